"""What to try next: the space of legal configs, strategies, samplers."""
