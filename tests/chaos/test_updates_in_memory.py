"""A worker is killed, or stopped for a while, within its update of the parameters in the memory of the ps."""

import os
import signal

import pytest

from tests.support.chaos import LAYER, RECIPE, SERVERS, finished
from tests.support.held_lock import SeenParameters

pytestmark = [pytest.mark.chaos, pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

LARGE = "keras.Sequential([keras.Input((64,)), *map(keras.layers.Dense, (1000, 1000, 10))])"
"""A model that takes a while to update."""
STEPS = 20 * 44


@pytest.fixture
def training(train):
    started = train(SERVERS, "--max-restarts", 5, module=RECIPE.replace(LAYER, LARGE).replace("(0.1,", "(0.01,"))
    started.until(lambda: started.trained)
    return started


@pytest.fixture
def seen(training):
    ps = training.events("started", "ps:0")[-1]["pid"]
    training.until(lambda: SeenParameters.exists(ps))
    return SeenParameters(ps)


@pytest.mark.rotates(5, 2)
def test_others_go_on_when_a_worker_is_killed_within_its_update(training, seen):
    holder = seen.stop_holder()
    os.kill(holder, signal.SIGKILL)
    training.until(lambda: seen.holder != holder, 5)
    done = finished(training, STEPS)
    assert [loss["restarts"] for loss in done.report["losses"]] == ["task"]
    assert seen.updates >= STEPS


@pytest.mark.rotates(5, 2)
def test_others_go_on_while_a_worker_is_stopped_within_its_update(training, seen):
    for _ in range(2):
        holder, before = seen.stop_holder(), seen.updates
        training.until(lambda before=before: seen.updates > before + 1, 5)
        os.kill(holder, signal.SIGCONT)
    done = finished(training, STEPS)
    assert done.report["losses"] == []
    assert seen.updates == STEPS
