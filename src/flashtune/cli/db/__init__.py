"""`flashtune db`: what a tuning database holds, how its rows travel, and its keeping."""
