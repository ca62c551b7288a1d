"""Several replicas in one task, as with `MirroredStrategy` on GPUs, train as one process does.

The devices are logical CPU devices of one process (`programs/replicas.py`).
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PROGRAM = Path(__file__).parents[2] / "support" / "programs" / "replicas.py"
TOLERANCES = {
    "adamw": 1e-5,
    "several updates": 1e-5,
    "averages": 1e-5,
    "accumulation": 1e-5,
    "bfloat16": 2e-2,
    "float16": 2e-3,
    "wire": 2e-2,
}
"""The largest difference from one process: narrow types round the gradient of each replica."""


class Replicas:
    """A process that trains by several replicas when a result is asked for; see `programs/replicas.py`.

    Args:
        count: the number of replicas.
    """

    def __init__(self, count):
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TF_CONFIG", "TFDIST_"))}
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(count)],
            env=kept | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(Path.cwd())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._found = {}

    def __getitem__(self, name):
        if name not in self._found:
            print(name, file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
            assert line, f"exit code {self._process.wait()}"
            self._found[name] = json.loads(line)
        assert "error" not in self._found[name], self._found[name]
        return self._found[name]

    def close(self):
        self._process.communicate()


@pytest.fixture(scope="module")
def replicas():
    """Makes a process with so many replicas: `replicas(2)`."""
    made = []

    @cache
    def make(count):
        made.append(Replicas(count))
        return made[-1]

    yield make
    for process in made:
        process.close()


@pytest.fixture
def one(replicas):
    return replicas(1)


@pytest.fixture
def two(replicas):
    return replicas(2)


@pytest.fixture
def six(replicas):
    return replicas(6)


def largest(some, others):
    pairs = zip(some, others, strict=True)
    return max(float(np.max(np.abs(np.subtract(a, b)), initial=0)) for a, b in pairs)


@pytest.mark.rotates(5)
@pytest.mark.parametrize("name", TOLERANCES)
def test_replicas_train_as_one_process_on_larger_batches(name, one, two):
    assert_same(name, one, two[name])


def test_six_replicas_train_as_one_process(one, six):
    assert_same("adamw", one, six["adamw"])


def assert_same(name, one, found):
    assert largest(found["variables"], one[name]["variables"]) < TOLERANCES[name]
    for metric, values in one[name]["history"].items():
        assert found["history"][metric] == pytest.approx(values, abs=5 * TOLERANCES[name])
    assert max(found["copies"]) == 0


def test_a_learning_rate_is_scaled_once(one, two):
    assert two["scaled"]["history"]["loss"] == pytest.approx(one["scaled"]["history"]["loss"], rel=1e-5)


def test_a_callback_sets_the_learning_rate(two):
    assert two["rates"]["rates"] == pytest.approx([0.02, 0.01])
    assert two["rates"]["rate"] == pytest.approx(0.01)


def test_moving_statistics_are_the_same_on_all_replicas(two):
    assert max(two["norm"]["copies"]) == 0
    assert two["norm"]["history"]["loss"][1] < two["norm"]["history"]["loss"][0]


def test_a_model_trained_by_replicas_is_exported(two):
    assert max(two["exported"]["difference"]) < 1e-6
    assert two["exported"]["rate"] == pytest.approx(0.01)


def test_replicas_resume_exactly(two):
    assert two["resumed"]["difference"] == 0
    assert max(two["resumed"]["copies"]) == 0


def test_examples_are_counted_exactly(two):
    trained, scored = zip(*two["counts"]["examples"], strict=True)
    assert list(trained) == [8 * 12, 5 + 7 * 12]  # 9 batches a pass make 4 steps; the 9th begins the next epoch
    assert list(scored) == [61, 61]
    assert two["counts"]["accuracy"][0] == pytest.approx(two["counts"]["accuracy"][1])


def test_metric_variables_have_what_is_reported(two):
    assert two["counts"]["scores"]["count"] == 61
    assert two["counts"]["read"] == pytest.approx(two["counts"]["scores"])


def test_replicas_drop_different_units(two):
    first, second = two["dropout"]
    kept = [tuple(units) for epoch in (first, second) for units in epoch]
    assert len(set(kept)) == 4
    assert all(16 < sum(units) < 48 for units in kept)


def test_a_batch_is_predicted_once(two):
    assert [rows for rows, _ in two["predicted"]] == [10, 10]
    assert max(difference for _, difference in two["predicted"]) < 1e-6


def test_integers_are_not_averaged_over_replicas(six):
    found = six["state"]  # a sixth, six times, is less than one
    assert found == {"copies": [0.0] * len(found["copies"]), "steps": 20}
