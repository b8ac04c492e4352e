"""The kernel families: their rules, what a launch of each takes, and how long it is predicted to last."""
