"""Damped least squares (Levenberg-Marquardt) with derivatives by differences: enough for a few dozen constants."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

NUDGE = 1e-3
"""Of a variable, for derivatives."""
ROUNDS = 30
LONGEST_STEP = 0.7
ENOUGH = 1e-5
"""Gain of a round below which there are no more."""


def least_squares(residuals: Callable[[Vector], Vector], start: Vector) -> Vector:
    """The variables near ``start`` with the least sum of squared residuals."""
    point, damping = start, 1e-2
    now = residuals(point)
    for _ in range(ROUNDS):
        slope = np.stack([(residuals(point + NUDGE * axis) - now) / NUDGE for axis in np.eye(len(start))], axis=1)
        square = slope.T @ slope
        gain = 0.0
        for _ in range(8):
            step = np.linalg.solve(square + damping * np.diag(np.diag(square)), -slope.T @ now)
            tried = point + np.clip(step, -LONGEST_STEP, LONGEST_STEP)
            then = residuals(tried)
            gain = 1 - float(then @ then) / float(now @ now)
            if gain > 0:
                point, now, damping = tried, then, max(damping / 5, 1e-6)
                break
            damping *= 4
        if gain < ENOUGH:
            break
    return point
