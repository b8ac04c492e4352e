"""The command line: `main.py` has the commands, `common/` what they share, `tune/` and `db/` the large ones."""
