"""Comparing what `programs/equivalence.py` has written."""

import numpy as np


def differences(some, others, recipe):
    """The largest difference of any variable, and of any value of the history."""
    worst = {"variables": 0.0, "history": 0.0}
    names = [name for name in some.files if name.startswith(f"{recipe}/")]
    assert names == [name for name in others.files if name.startswith(f"{recipe}/")]
    for name in names:
        kind = "history" if "/history/" in name else "variables"
        difference = np.abs(np.float64(some[name]) - np.float64(others[name]))
        worst[kind] = max(worst[kind], float(np.max(difference, initial=0.0)))
    return worst
