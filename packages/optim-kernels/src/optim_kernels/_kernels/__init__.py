"""Triton kernels and what is inside them; launches of AdamW and of clipping are in the public modules beside."""
