"""The models of the zoo train with every engine as with Keras's own `fit`, or are refused with the expected code.

A test run takes another two models each day. TFDIST_TEST_LONG=1 takes all, which takes an hour on two cores;
TFDIST_TEST_ZOO="adam u_net" takes these.
"""

import os

import pytest

from tests.zoo.__main__ import run
from tests.zoo.engines import ENGINES
from tests.zoo.models import CASES

pytestmark = [pytest.mark.cluster, pytest.mark.rotates(1), pytest.mark.timeout(7200)]

EACH_DAY = 2


def chosen():
    """Returns the names of the models to train."""
    named = os.environ.get("TFDIST_TEST_ZOO", "").split()
    if named or os.environ.get("TFDIST_TEST_LONG") == "1":
        return named or list(CASES)
    # Models of one kind a day: the two kinds have other engines, and each engine takes the time to start a cluster.
    names = sorted(CASES, key=lambda name: (bool(CASES[name].example), name))
    first = EACH_DAY * int(os.environ["TFDIST_TEST_DAY"]) % len(names)
    return names[first : first + EACH_DAY]


def test_models_train_as_by_keras_or_are_refused(tmp_path):
    names = chosen()
    print(f'TFDIST_TEST_ZOO="{" ".join(names)}" takes the same models')
    found = run(names, list(ENGINES), tmp_path)
    wrong = {
        f"{name}, {ENGINES[key].title}": f"{result.state}: {result.difference:.0e} {result.code} {result.detail}"
        for name, results in found.items()
        for key, result in results.items()
        if not as_expected(name, key, result)
    }
    assert not wrong


def as_expected(name, key, result):
    """Whether a model is trained, or refused with the expected code."""
    expected = CASES[name].refusal(key)
    if expected:
        return (result.state, result.code) == ("refused", expected)
    return result.state in ("ok", "random", "close")
