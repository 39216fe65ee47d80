"""Kernels of Newton–Schulz's products for Hopper, in Gluon; ``_newton_schulz`` and ``functional`` launch them.

What is where:

    ping_pong_kernels                         products of many tiles of 128×128: two consumers multiply in turn
    wide_kernel                               tiles of 128×256, which both consumers multiply together
    lone_kernel, lone_…                       products of one round: a tile for each multiprocessor
    update_kernel                             the last product, and the update of the parameters
    int8_kernel                               a first step in int8
    chain_kernel, chain_…                     all products of a batch in one launch
    flags ring turns mail pairs overlap       what they share: names of compile-time arguments, slots of operands, turns
                                              of consumers, messages between warps and between programs, overlapping
                                              launches
"""
