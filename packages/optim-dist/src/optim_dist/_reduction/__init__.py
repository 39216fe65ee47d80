"""Moving gradients and parameters between ranks: the collectives, and what they reduce and gather when.

What is where:

    collectives groups grid                   the ranks: on a line, in groups of their own, in a grid
    peers meetings written_streams            ranks that copy from each other's memory, for ``transport="symm"``
    storage joined                            buckets; many tensors as one
    streamed rolling tree                     gradients that are not kept, and sums of all micro-batches in one tree
    forward_gathers early_reads               what the next forward pass waits for, and what it reads too early
    compiled                                  modules that are compiled, or run inside of such
"""
