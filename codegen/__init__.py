"""From (Problem, Config, Gpu) to a running plan. Knows nothing of tuning or SQL."""
