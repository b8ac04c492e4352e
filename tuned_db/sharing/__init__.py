"""Merge, push and pull, differences, a team's tables."""
