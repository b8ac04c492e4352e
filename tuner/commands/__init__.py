"""Other uses of a run: verify, noise, one config for many problems, Optuna export."""
