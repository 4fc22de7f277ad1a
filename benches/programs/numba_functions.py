"""A function of Numba with `cache=True`."""

import numba
import numpy as np


@numba.njit(cache=True)
def total(values):
    found = 0.0
    for value in values:
        found += value * 2
    return found


assert total(np.arange(5.0)) == 20.0
