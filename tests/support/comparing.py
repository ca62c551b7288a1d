"""Compares the results of `programs/equivalence.py` and `programs/rules.py`."""

import numpy as np


def differences(some, others, recipe, of=None):
    """Returns the largest difference of a variable, and of a value of the history.

    Args:
        some: the results of one process.
        others: the results of another process.
        recipe: the training in `some` to compare.
        of: the training in `others`; `recipe` by default.
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
    """Returns the names of a training's results: `00`, `00/path`, `history/loss`."""
    names = [name.removeprefix(f"{recipe}/") for name in written.files if name.startswith(f"{recipe}/")]
    return [name for name in names if name.split("/")[0] == "history" or name.split("/")[0].isdigit()]
