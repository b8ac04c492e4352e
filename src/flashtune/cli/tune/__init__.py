"""`flashtune tune`, `noise` and `export-optuna`."""
