"""Chi-square goodness of fit with its power stated.

A distribution q with total variation d from p has ``sum (q-p)^2 / p >= (sum |q-p|)^2 = 4 d^2``
(Cauchy-Schwarz), whatever its shape. So n samples of q give a noncentrality of at least
``4 n d^2``, and the power of the test against *any* q that far away is at least that of the
noncentral chi-square at that value.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq
from scipy.stats import chi2, ncx2

ALPHA = 0.001
POWER = 0.99
TOTAL_VARIATION = 0.02


def needed_noncentrality(freedom: int) -> float:
    """The noncentrality that is rejected at ALPHA with probability POWER."""
    threshold = chi2.isf(ALPHA, freedom)
    return float(brentq(lambda x: ncx2.sf(threshold, freedom, x) - POWER, 1.0, 1e4))


def needed_samples(freedom: int, distance: float = TOTAL_VARIATION) -> int:
    """Samples that detect a total variation of ``distance`` with POWER at ALPHA."""
    return math.ceil(needed_noncentrality(freedom) / (4 * distance**2))


def detectable(freedom: int, samples: int) -> float:
    """The smallest total variation that so many samples detect with POWER at ALPHA."""
    return math.sqrt(needed_noncentrality(freedom) / (4 * samples))


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Of counts [V] under probabilities [V]; a sample where the probability is 0 gives 0."""
    if counts[probabilities == 0].any():
        return 0.0
    seen = probabilities > 0
    if seen.sum() == 1:
        return 1.0
    expected = probabilities[seen] / probabilities[seen].sum() * counts.sum()
    statistic = ((counts[seen] - expected) ** 2 / expected).sum()
    return float(chi2.sf(statistic, seen.sum() - 1))


def sequential_p_value(chosen: np.ndarray, probabilities: np.ndarray) -> tuple[float, int]:
    """(p value, degrees of freedom) of cells ``chosen`` [n], each drawn from its own row of
    ``probabilities`` [n, V], where a row may depend on earlier draws.

    The count of a cell less its expectation is a martingale whose covariance is the sum of the
    multinomials', so the quadratic form is chi-square. That covariance is at most the diagonal of the
    expected counts, so the noncentrality bound above holds for the mean distribution over cells.
    """
    expected = probabilities.sum(0)
    counts = np.bincount(chosen, minlength=len(expected))
    cells = expected >= 5
    # Cells too thin for the normal approximation count as one, which is the one left out.
    difference = (counts - expected)[cells]
    kept = probabilities[:, cells]
    covariance = np.diag(kept.sum(0)) - kept.T @ kept
    if np.isclose(kept.sum(), len(kept)):  # nothing was left out, so one cell is redundant
        difference, covariance = difference[1:], covariance[1:, 1:]
    statistic = float(difference @ np.linalg.solve(covariance, difference))
    return float(chi2.sf(statistic, len(difference))), len(difference)
