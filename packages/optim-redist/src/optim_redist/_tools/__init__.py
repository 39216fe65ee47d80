"""Tools that know nothing of tensors and layouts.

What is where:

    lazy recent     attributes that are computed when first asked for; a cache that threads share
    files           JSON read and checked, with errors that name the file
    progress        a progress bar
"""
