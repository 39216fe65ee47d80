"""Plans at work on tensors: what a rank packs, sends, receives and adds.

What is where:

    given refusals                  tensors as callers give them: resolved, freed; and which a program refuses
    views copies buffers            views of memory, strided copies between them, where an exchange's buffers lie
    message rank_program            what travels between two ranks, and what one rank does in a phase
    reduction stage_program         combining contributions; a stage, its phases and its target
    collectives                     teams of ranks, and all calls of torch.distributed
    one_buffer native one_call      stages and phases that are one call, with as little on the host as can be
    bucket_exchange many_program    many tensors in one exchange
"""
