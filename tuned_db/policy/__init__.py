"""Pure functions over measurements: winners, trust, blocklist, plausibility, distance of GPU models."""
