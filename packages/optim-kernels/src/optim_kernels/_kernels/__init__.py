"""Triton kernels and their device functions; AdamW's and clipping's kernels are in the public modules beside."""
