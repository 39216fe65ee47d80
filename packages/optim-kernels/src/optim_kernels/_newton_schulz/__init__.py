"""The host side of Newton–Schulz, from coefficients to launches; kernels are in ``_kernels`` and ``_hopper``."""
