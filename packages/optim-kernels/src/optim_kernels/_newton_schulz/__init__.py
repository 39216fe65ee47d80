"""Newton–Schulz on the GPU: what is decided on the host, from coefficients to launches; kernels are next door."""
