"""Synchronous workers update the parameters in the memory of the ps; one is killed at some place of a step."""

import os
import signal

import pytest

from tests.support.chaos import LAYER, RECIPE, SERVERS, check_metrics, finished
from tests.support.seen_steps import SeenSteps

pytestmark = [pytest.mark.chaos, pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

LARGE = "keras.Sequential([keras.Input((64,)), *map(keras.layers.Dense, (1000, 1000, 10))])"
"""A model that takes a while to update."""
STEPS = 20 * 22


@pytest.fixture
def synchronous(train):
    """Launches a training, and waits until its workers take steps."""

    def start():
        module = RECIPE.replace(LAYER, LARGE).replace("(0.1,", "(0.01,")
        return train(SERVERS, "--max-restarts", 9, "--set", "updates.mode=sync", module=module)

    return start


def epochs(done):
    return [line["values"] for line in check_metrics(done.run_dir) if line["epoch_done"]]


@pytest.mark.rotates(5, 3)
def test_what_is_trained_is_the_same_when_workers_are_killed_within_updates(synchronous):
    training = synchronous()
    training.until(lambda: training.trained)
    ps = training.events("started", "ps:0")[-1]["pid"]
    training.until(lambda: SeenSteps.exists(ps))
    seen = SeenSteps(ps)
    for worker in (0, 1, 0):
        task = f"worker:{worker}"
        process, before = training.events("started", task)[-1]["pid"], len(training.events("started", task))
        seen.stop_within_update(worker, process)
        os.kill(process, signal.SIGKILL)
        training.until(lambda task=task, before=before: len(training.events("started", task)) > before, 60)
        step = seen.steps(worker)[0]
        training.until(lambda worker=worker, step=step: seen.steps(worker)[0] > step + 1, 60)
    done = finished(training, STEPS)
    assert [loss["restarts"] for loss in done.report["losses"]] == ["task"] * 3
    undisturbed = finished(synchronous(), STEPS)
    assert epochs(done) == epochs(undisturbed)
    assert len(epochs(done)) == 20
