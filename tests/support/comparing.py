"""Comparing what `programs/equivalence.py` and `programs/rules.py` have written."""

import numpy as np


def differences(some, others, recipe, of=None):
    """The largest difference of any variable, and of any value of the history.

    Args:
        some: what one process has written.
        others: what another one has written.
        recipe: which training of `some` to compare.
        of: which one of `others`; the same by default.
    """
    worst = {"variables": 0.0, "history": 0.0}
    names = _names(some, recipe)
    assert names
    assert names == _names(others, of or recipe)
    for name in names:
        kind = "history" if name.startswith("history/") else "variables"
        difference = np.abs(np.float64(some[f"{recipe}/{name}"]) - np.float64(others[f"{of or recipe}/{name}"]))
        worst[kind] = max(worst[kind], float(np.max(difference, initial=0.0)))
    return worst


def _names(written, recipe):
    """What was written of a training: `00` or `00/path`, and `history/loss`; not what another one's longer name has."""
    names = [name.removeprefix(f"{recipe}/") for name in written.files if name.startswith(f"{recipe}/")]
    return [name for name in names if name.split("/")[0] == "history" or name.split("/")[0].isdigit()]
