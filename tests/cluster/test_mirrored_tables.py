"""Mirrored workers that exchange rows of tables train as one process that gets each gradient of a row by itself."""

import numpy as np
import pytest

from tests.support.comparing import differences
from tests.support.selected import selected
from tests.support.tasks import alone, program

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(700)]

RECIPES = (
    "sgd",
    "adagrad",
    "momentum",
    "adam",
    "rmsprop",
    "norm",
    "nadam",
    "whole",
    "clipped",
    "averaged",
    "accumulation",
    "tied",
    "own",
    "xla",
    "on float16",
    "adagrad on float16",
    "whole adagrad on float16",
)
BY_SGD = ("sgd", "momentum", "averaged", "accumulation", "on float16")
BATCH, STEPS = 8, 50


@pytest.fixture(scope="module")
def results(request, module_cluster, tmp_path_factory):
    """The results of each of 2 workers, and of one process with batches of twice the size."""
    names = [f"rows {recipe}" for recipe in selected(request, "recipe")]
    tasks = module_cluster(worker=2)
    for task in tasks.tasks:
        tasks.start(
            program("equivalence.py", task.replace(":", "-"), BATCH, *names), task, env={"TF_NUM_INTRAOP_THREADS": "1"}
        )
    ended = tasks.finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    folder = tmp_path_factory.mktemp("alone")
    one = alone(folder, program("equivalence.py", "out", 2 * BATCH, *names))
    assert one.code == 0, one.err
    workers = [np.load(tasks.folder / f"{task.replace(':', '-')}.npz") for task in tasks.tasks]
    assert all(worker["meshed"] for worker in workers)
    return *workers, np.load(folder / "out.npz")


@pytest.mark.rotates(5, by="recipe")
@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_of_two_workers_equal_one_process_with_twice_the_batch(recipe, results):
    first, second, single = results
    worst = differences(first, single, f"rows {recipe}")
    tolerance = 4 * 2.0**-11 if recipe.endswith("on float16") else 1e-5
    assert worst["variables"] < tolerance
    assert worst["history"] < 2 * tolerance  # one example more or less of 400 is right
    assert differences(first, second, f"rows {recipe}")["variables"] == 0
    # Other optimizers take the squares of rows too, but of positions only sums: these cross by themselves.
    each = STEPS if recipe in BY_SGD else 2 * STEPS
    exchanges = {"tied": 0, "own": 2 * each}.get(recipe, 0 if recipe.startswith("whole") else each)
    assert first[f"rows {recipe}/gathers"] == exchanges  # fewer if the optimizations were given up
    assert not single[f"rows {recipe}/gathers"]
