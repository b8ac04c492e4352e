"""GPU models, the devices of this machine, CuPy, the roofline."""
