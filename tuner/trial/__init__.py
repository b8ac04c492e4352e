"""What came of a trial: outcome, timing statistics, sensors of the card."""
