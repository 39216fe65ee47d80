"""Kernels of Newton–Schulz's products for Hopper, in Gluon; ``_newton_schulz`` and ``functional`` launch them."""
