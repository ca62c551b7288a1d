"""Mirrored workers train as one process with all their batches, and their variables stay equal."""

import re
import signal

import numpy as np
import pytest

from tests.support.comparing import differences
from tests.support.selected import selected
from tests.support.tasks import alone, program

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(700)]

RECIPES = (
    "sgd",
    "momentum",
    "adam",
    "adagrad",
    "clipped",
    "averaged",
    "accumulation",
    "float16",
    "scaled",
    "gradients",
)
ROUNDED = {"on bfloat16": 2.0**-8, "on float16": 2.0**-11}
"""The relative rounding of these types of the wire."""
ENVIRONMENTS = {"mesh": {"TF_NUM_INTRAOP_THREADS": "1"}, "collectives": {"TFDIST_COMMUNICATION": "ring"}}
"""The environment of worker 1: a single thread, as the launcher's plan has it here, or no all-reduce of our own."""


def trained(tasks, *names, batch=8, env=None):
    """The results of each worker."""
    for task in tasks.tasks:
        tasks.start(program("equivalence.py", task.replace(":", "-"), batch, *names), task, env=(env or {}).get(task))
    ended = tasks.finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    assert tasks.leftover_processes() == []
    return [np.load(tasks.folder / f"{task.replace(':', '-')}.npz") for task in tasks.tasks]


@pytest.fixture(scope="module")
def single(request, tmp_path_factory):
    """The results of one process with batches of twice the size."""
    folder = tmp_path_factory.mktemp("alone")
    ended = alone(folder, program("equivalence.py", "out", 16, *names(request)))
    assert ended.code == 0, ended.err
    return np.load(folder / "out.npz")


def names(request):
    """The models that `programs/equivalence.py` trains in this run."""
    return [f"plain {recipe}" for recipe in selected(request, "recipe")]


@pytest.fixture(scope="module", params=ENVIRONMENTS)
def two_workers(request, module_cluster, single):
    """The results of each of 2 workers, and of the one process."""
    first, second = trained(module_cluster(worker=2), *names(request), env={"worker:1": ENVIRONMENTS[request.param]})
    assert first["meshed"] == second["meshed"] == (request.param == "mesh")
    return first, second, single


@pytest.mark.rotates(5, by="recipe")
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_workers_equal_one_process_with_twice_the_batch(recipe, two_workers):
    first, second, single = two_workers
    worst = differences(first, single, f"plain {recipe}")
    tolerance = 1e-3 if recipe == "float16" else 1e-5  # float16 has 11 bits
    assert worst["variables"] < tolerance
    assert worst["history"] < tolerance
    assert differences(first, second, f"plain {recipe}")["variables"] == 0


@pytest.mark.rotates(5, by="recipe")
@pytest.mark.parametrize(("recipe", "rounding"), ROUNDED.items())
def test_a_narrow_wire_changes_no_more_than_its_rounding(recipe, rounding, two_workers):
    first, second, single = two_workers
    worst = differences(first, single, f"plain {recipe}")
    assert worst["variables"] > 0
    assert worst["history"] < 4 * rounding
    assert differences(first, second, f"plain {recipe}")["variables"] == 0


@pytest.mark.rotates(5, 1)
def test_three_workers_equal_one_process_with_thrice_the_batch(module_cluster, tmp_path):
    names = ["plain adam", "plain on bfloat16"]
    tasks = module_cluster(worker=3)
    workers = trained(tasks, *names, batch=4, env=dict.fromkeys(tasks.tasks, ENVIRONMENTS["mesh"]))
    one = alone(tmp_path, program("equivalence.py", "out", 12, *names))
    assert one.code == 0, one.err
    exact, rounded = (differences(workers[0], np.load(tmp_path / "out.npz"), name) for name in names)
    assert max(exact.values()) < 1e-5
    assert rounded["history"] < 4 * ROUNDED["on bfloat16"]
    for name in names:
        assert [differences(workers[0], other, name)["variables"] for other in workers[1:]] == [0, 0]


BY_SPEED = {
    "proportional/dense/adam/2/turns": "async/dense/adam/2",
    "proportional/tables/sgd/2/turns": "async/tables/sgd/2",
}


@pytest.fixture(scope="module", params=ENVIRONMENTS)
def of_any_sizes(request, module_cluster, tmp_path_factory):
    """The results of 2 workers whose batches change their sizes, and of one process."""
    tasks = module_cluster(worker=2)
    for task in tasks.tasks:
        arguments = program("rules.py", task.replace(":", "-"), *selected(request, "case"))
        tasks.start(arguments, task, env=ENVIRONMENTS[request.param] if task == "worker:1" else {})
    ended = tasks.finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    folder = tmp_path_factory.mktemp("alone")
    one = alone(folder, program("rules.py", "out", *selected(request, "same")))
    assert one.code == 0, one.err
    workers = [np.load(tasks.folder / f"{task.replace(':', '-')}.npz") for task in tasks.tasks]
    return ended["worker:0"].result, workers, np.load(folder / "out.npz")


@pytest.mark.rotates(5)
@pytest.mark.parametrize(("case", "same"), BY_SPEED.items())
def test_batches_of_different_sizes_equal_one_process_with_twice_the_batch(case, same, of_any_sizes):
    facts, (first, second), single = of_any_sizes
    assert max(differences(first, single, case, same).values()) < 1e-5
    assert differences(first, second, case)["variables"] == 0
    assert (facts[case]["iterations"], facts[case]["examples"]) == (36, 36 * 16)
    examples = [worker["examples"] for worker in facts[case]["workers"].values()]
    assert sum(examples) == 36 * 16
    assert examples[0] != examples[1]


OF_ONE_HOST = [f"factored/{optimizer}/{{}}" for optimizer in ("adam", "momentum", "decaying", "adagrad")]
"""Cases of so many workers."""
APART = {"in memory": {}, "apart": {"TFDIST_SHARE_MEMORY": "0"}}
"""The environment of the last worker."""


@pytest.fixture(scope="module", params=[(2, "in memory"), (2, "apart"), (3, "in memory")], ids=str)
def of_one_host(request, module_cluster, tmp_path_factory):
    """The results of workers whose updates each of them makes a part of, if they share memory, and of one process."""
    workers, kind = request.param
    tasks = module_cluster(worker=workers)
    cases = [case.format(workers) for case in selected(request, "factored")]
    for number, task in enumerate(tasks.tasks):
        env = APART[kind] if number + 1 == workers else {}
        tasks.start(program("rules.py", task.replace(":", "-"), *(f"sync/{case}" for case in cases)), task, env=env)
    ended = tasks.finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    assert tasks.leftover_processes() == []
    folder = tmp_path_factory.mktemp("alone")
    one = alone(folder, program("rules.py", "out", *(f"async/{case}" for case in cases)))
    assert one.code == 0, one.err
    found = [np.load(tasks.folder / f"{task.replace(':', '-')}.npz") for task in tasks.tasks]
    runs = {fact["runs_in_memory"] for end in ended.values() for fact in end.result.values()}
    return workers, kind, runs, found, np.load(folder / "out.npz")


@pytest.mark.rotates(5, 2, by="factored")
@pytest.mark.parametrize("factored", OF_ONE_HOST)
def test_workers_that_update_parts_equal_one_process(factored, of_one_host):
    workers, kind, runs, (first, *others), single = of_one_host
    case, same = (f"{rule}/{factored.format(workers)}" for rule in ("sync", "async"))
    assert min(runs) >= 2 if kind == "in memory" else runs == {0}
    assert max(differences(first, single, case, same).values()) < 1e-5
    assert [differences(first, other, case)["variables"] for other in others] == [0] * (workers - 1)


@pytest.mark.rotates(5)
@pytest.mark.parametrize("units", [[], [1000]], ids=["summed", "in memory"])
@pytest.mark.parametrize(("stopped_by", "reason"), [("SIGKILL", "connection"), ("SIGSTOP", "no answer for 1")])
def test_without_a_launcher_workers_exit_if_another_one_is_lost(stopped_by, reason, units, module_cluster):
    tasks = module_cluster(worker=3)
    tasks.start(program("endless.py", *units))
    tasks.await_text("worker:0", "trains")
    tasks.processes["worker:2"].send_signal(signal.Signals[stopped_by])
    for task in ("worker:0", "worker:1"):
        assert tasks.processes[task].wait(60) == 1
    written = tasks.result_of("worker:0").err + tasks.result_of("worker:1").err
    assert re.search(rf"TaskLost: worker:2 .*{reason}", written)
    tasks.processes["worker:2"].kill()
