"""From template to cubin: Jinja, NVRTC, kept kernels."""
