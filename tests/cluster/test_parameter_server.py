"""Training on parameter servers: one worker, or several that take turns, equal one process."""

from collections import Counter

import numpy as np
import pytest

from tests.support.comparing import differences
from tests.support.selected import selected
from tests.support.tasks import alone, program

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(700)]

RECIPES = ("sgd", "momentum", "adam", "adagrad", "everything", "accumulation", "float16", "gradients", "frozen")


@pytest.fixture(scope="module")
def one_worker(request, module_cluster, tmp_path_factory):
    """The results of 1 worker and 2 ps, and of one process, by recipe."""
    tasks = module_cluster(chief=1, ps=2, worker=1)
    folder = tmp_path_factory.mktemp("alone")
    command = program("equivalence.py", "out", 16, *selected(request, "recipe"))
    tasks.start(command)
    single = alone(folder, command)
    assert single.code == 0, single.err
    ended = tasks.finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    return np.load(tasks.folder / "out.npz"), np.load(folder / "out.npz")


@pytest.mark.rotates(5)
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_worker_equals_one_process(recipe, one_worker):
    some, others = one_worker
    worst = differences(some, others, recipe)
    assert worst["variables"] < 1e-5
    assert worst["history"] < 1e-5


@pytest.mark.rotates(5)
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "everything"])
def test_two_workers_that_take_turns_equal_one_process(optimizer, cluster, tmp_path):
    tasks = cluster(chief=1, ps=2, worker=2)
    command = program("equivalence.py", "out", 480, optimizer)
    ended = tasks.start(command).finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    single = alone(tmp_path, command)
    assert single.code == 0, single.err
    worst = differences(np.load(tasks.folder / "out.npz"), np.load(tmp_path / "out.npz"), optimizer)
    assert worst["variables"] < 1e-5
    assert worst["history"] < 1e-5


def test_a_step_takes_one_message_each_way_for_each_ps(cluster):
    tasks = cluster(chief=1, ps=2, worker=1)
    ended = tasks.start(program("messages.py")).finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    totals = {steps: Counter() for steps in "23"}
    for steps, found in ended["chief:0"].result.items():
        for pair, count in found.items():
            totals[steps][" ".join(task.partition(":")[0] for task in pair.split())] += count
    assert totals["3"] - totals["2"] == {"worker ps": 2, "ps worker": 2}
    assert set(totals["2"]) == {"worker ps", "ps worker"}
