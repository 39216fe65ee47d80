"""What makes the tests quick.

    imports           imports that are not looked through for garbage
    interpreter       Triton's interpreter without what it does for nothing
        launches      kernels and device functions, and the functions of ``tl`` that they find
        operators     arithmetic and comparisons
        functions     loads, choices, casts and new axes
    ranks             what each rank would do before its first kernels

Without it they compute the same in more time, as its own tests compare.
"""
