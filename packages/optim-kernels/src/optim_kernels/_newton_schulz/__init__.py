"""The host side of Newton–Schulz, from coefficients to launches; kernels are in ``_kernels`` and ``_hopper``.

What is where:

    config coefficients                 what determines a run
    iterations torch_products           the iterations, and their products, in plain torch
    backward                            the derivative
    plan buffers job_launches           a run on a GPU, where X and the factors lie; product by product
    chain chain_jobs chain_list         a run in one launch; the products of a run; the order of their tiles
    int8_start                          a first step in int8
    product_ops                         the products as functions with gradients
    product_launches hopper_launches    their launches, those for Hopper apart
    block_launch copy_engine            launches that are kept; how matrices have to lie for them
    tiles tile_choice                   a product's tile, by its shape and by the device
    direct_calls outputs                calls that need no operator; tensors that callers give for results
"""
