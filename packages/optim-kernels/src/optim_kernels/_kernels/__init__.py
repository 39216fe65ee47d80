"""Triton kernels and their device functions; AdamW's and clipping's kernels are in the public modules beside.

What is where:

    adamw_chunk adamw_tiles adamw_update    AdamW: a program's chunk, a tile in every format, the formula
    moment_codes moment_scales              its moments in 8 bits, and the scales of these
    muon_momentum muon_update               Muon's step, before its products and after them
    muon_parameter muon_tiles muon_table    a parameter's elements, tiles of its matrices, the columns of tables
    muon_elements                           the elementwise parts alone, over tensors that lie flat
    normalize product symmetric             Newton–Schulz: how it starts, and its two products
    int8_rounding lone_places               what kernels of `_hopper` need: X in int8, a program's tile
    slices                                  the sum of slices
    flat_tiles chunks step_counts           flat tensors: tiles, chunks, and their counts of steps
    rounding approximations                 masters and random rounding; approximate functions
"""
