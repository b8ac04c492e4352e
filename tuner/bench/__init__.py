"""The device side of a trial: inputs, checks, timer."""
