"""Least squares for constants that are seconds: none of them is below nought."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def non_negative(
    design: NDArray[np.float64], took: NDArray[np.float64], weight: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """float64[C]: what one unit of each column of `design`, float64[N, C], costs, so that its rows tell `took`,
    float64[N] in seconds and above nought. By the relative error, squared and times `weight`, float64[N]; without weights a long
    one weighs no more than a short one. What would be negative is left out, the worst first."""
    wanted = np.ones(len(took)) if weight is None else np.sqrt(weight)
    rows = design * (wanted / took)[:, None]
    scale = np.abs(rows).max(axis=0)
    used = np.flatnonzero(scale).tolist()  # of what never happened nothing is known
    while used:
        part, *_ = np.linalg.lstsq(rows[:, used] / scale[used], wanted, rcond=None)
        if part.min() >= 0:
            found = np.zeros(rows.shape[1])
            found[used] = part / scale[used]
            return found
        del used[int(part.argmin())]
    return np.zeros(rows.shape[1])
