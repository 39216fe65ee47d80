"""What the optimizer classes are made of: groups, state, updates. No kernel code.

What is where:

    base group_clipping private_state         what all classes share
    stepping explaining                       what surrounds the update in a step, and what is said of it
    inference                                 calls under ``torch.inference_mode()``
    fitting                                   whether gradient and state still belong to their parameter
    kinds plain_options                       groups of both kinds, and as a state dict holds them
    storage followed_writes                   dtypes of parameters, masters, step counts; masters that follow writes
    adamw_base                                what both classes with AdamW groups share
    adamw_options adamw_state adamw_codes     AdamW's options, states and their 8-bit codes
    adamw_paths adamw_step                    what updates a parameter; the prepared step, with the kernels' part
    adamw_steady                              taking a step like the one before
    adamw_parts adamw_torch                   plain torch's part, and its step
    muon_base muon_options                    what Muon's classes share, their options
    muon_views muon_entries                   how parameters are matrices; what a step needs of each
    muon_batches muon_planner muon_steady     what is stepped together, its step, recognising one like the one before
    muon_explain                              what is said of it
    adamw_checkpoints nanochat_checkpoints    what AdamW's state dicts hold, and those of another optimizer
"""
