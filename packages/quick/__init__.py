"""What makes the tests quick; no test needs it, and where it is missing all of them do the same in more time.

imports        imports that are not looked through for garbage
interpreter    Triton's interpreter without what it does for nothing
    launches       kernels and device functions, and the functions of ``tl`` that they find
    operators      arithmetic and comparisons
    functions      loads, choices, casts and new axes
ranks          what each rank would do before its first kernels
"""
