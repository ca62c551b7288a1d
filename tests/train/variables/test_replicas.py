"""Several replicas in one task, as with `MirroredStrategy` on GPUs, train as one process does.

The devices are logical CPU devices of one process (`programs/replicas.py`).
"""

import json
import os
import subprocess
import sys
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
IN_ONE = (*TOLERANCES, "scaled")
ALL = (*IN_ONE, "rates", "norm", "exported", "resumed", "counts", "dropout", "predicted")


def ran(replicas, names):
    """Runs the program and returns its results by name."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TF_CONFIG", "TFDIST_"))}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(replicas), *names],
        env=environment | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=350,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: found for line in done.stdout.splitlines() for name, found in json.loads(line).items()}


@pytest.fixture(scope="module")
def one():
    return ran(1, IN_ONE)


@pytest.fixture(scope="module")
def two():
    return ran(2, ALL)


@pytest.fixture(scope="module")
def four():
    return ran(4, ["adamw", "resumed"])


def largest(some, others):
    pairs = zip(some, others, strict=True)
    return max(float(np.max(np.abs(np.subtract(a, b)), initial=0)) for a, b in pairs)


@pytest.mark.parametrize("name", TOLERANCES)
def test_replicas_train_as_one_process_on_larger_batches(name, one, two):
    assert_same(name, one, two[name])


def test_four_replicas_train_as_one_process(one, four):
    assert_same("adamw", one, four["adamw"])
    assert four["resumed"]["difference"] == 0


def assert_same(name, one, found):
    assert "error" not in found, found
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


def test_replicas_drop_different_units(two):
    first, second = two["dropout"]
    kept = [tuple(units) for epoch in (first, second) for units in epoch]
    assert len(set(kept)) == 4
    assert all(16 < sum(units) < 48 for units in kept)


def test_a_batch_is_predicted_once(two):
    assert [rows for rows, _ in two["predicted"]] == [10, 10]
    assert max(difference for _, difference in two["predicted"]) < 1e-6


def test_integers_are_not_averaged_over_replicas():
    found = ran(6, ["state"])["state"]  # a sixth, six times, is less than one
    assert found == {"copies": [0.0] * len(found["copies"]), "steps": 20}
