"""Between tuner and store: rows, budget, the report."""
