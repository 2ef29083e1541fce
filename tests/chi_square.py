"""Whether counts of draws look like their probabilities: Pearson's chi-square with the degrees of freedom it has."""

import math
from statistics import NormalDist

import numpy as np

_HONEST_SHARE = 0.999  # of honest samplers that pass; with fixed seeds a test passes always or never


def limit(degrees: int) -> float:
    """What chi-square of so many degrees of freedom exceeds once in a thousand times (Wilson and Hilferty's formula,
    at most 1.5 % too large from four degrees on)."""
    part = 2 / (9 * degrees)
    root = 1 - part + NormalDist().inv_cdf(_HONEST_SHARE) * math.sqrt(part)
    return float(degrees * root**3)


def assert_drawn_from(observed: np.ndarray, probabilities: np.ndarray) -> None:
    """`observed[i]` counts how often `i` was drawn, `probabilities` sum to 1; what has none must not be drawn."""
    expected = probabilities * observed.sum()
    possible = probabilities > 0
    assert observed[~possible].sum() == 0, "something was drawn that has no probability"
    assert expected[possible].min() >= 5, "chi-square needs some five draws of each"
    distance = float(((observed - expected)[possible] ** 2 / expected[possible]).sum())
    degrees = int(possible.sum()) - 1
    assert distance < limit(degrees), f"chi-square is {distance:.1f} with {degrees} degrees of freedom"
