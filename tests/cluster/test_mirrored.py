"""Mirrored workers train as one process with all their batches, and their variables stay equal."""

import re
import signal

import numpy as np
import pytest

from tests.support.comparing import differences
from tests.support.tasks import alone, program

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(700), pytest.mark.rotates(2, 1)]

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
NAMES = [f"plain {recipe}" for recipe in (*RECIPES, *ROUNDED)]
ENVIRONMENTS = {"mesh": {"TF_NUM_INTRAOP_THREADS": "1"}, "collectives": {"NO_CIRCLE": "yes"}}
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
def single(tmp_path_factory):
    """The results of one process with batches of twice the size."""
    folder = tmp_path_factory.mktemp("alone")
    ended = alone(folder, program("equivalence.py", "out", 16, *NAMES))
    assert ended.code == 0, ended.err
    return np.load(folder / "out.npz")


@pytest.fixture(scope="module", params=ENVIRONMENTS)
def two_workers(request, module_cluster, single):
    """The results of each of 2 workers, and of the one process."""
    first, second = trained(module_cluster(worker=2), *NAMES, env={"worker:1": ENVIRONMENTS[request.param]})
    assert first["meshed"] == second["meshed"] == (request.param == "mesh")
    return first, second, single


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_workers_equal_one_process_with_twice_the_batch(recipe, two_workers):
    first, _, single = two_workers
    worst = differences(first, single, f"plain {recipe}")
    tolerance = 1e-3 if recipe == "float16" else 1e-5  # float16 has 11 bits
    assert worst["variables"] < tolerance
    assert worst["history"] < tolerance


@pytest.mark.parametrize(("recipe", "rounding"), ROUNDED.items())
def test_a_narrow_wire_changes_no_more_than_its_rounding(recipe, rounding, two_workers):
    first, _, single = two_workers
    worst = differences(first, single, f"plain {recipe}")
    assert worst["variables"] > 0
    assert worst["history"] < 4 * rounding


@pytest.mark.parametrize("recipe", [*RECIPES, *ROUNDED])
def test_both_workers_have_the_same_variables(recipe, two_workers):
    first, second, _ = two_workers
    assert differences(first, second, f"plain {recipe}")["variables"] == 0


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
        arguments = program("rules.py", task.replace(":", "-"), *BY_SPEED)
        tasks.start(arguments, task, env=ENVIRONMENTS[request.param] if task == "worker:1" else {})
    ended = tasks.finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    folder = tmp_path_factory.mktemp("alone")
    one = alone(folder, program("rules.py", "out", *BY_SPEED.values()))
    assert one.code == 0, one.err
    workers = [np.load(tasks.folder / f"{task.replace(':', '-')}.npz") for task in tasks.tasks]
    return ended["worker:0"].result, workers, np.load(folder / "out.npz")


@pytest.mark.parametrize(("case", "same"), BY_SPEED.items())
def test_batches_of_different_sizes_equal_one_process_with_twice_the_batch(case, same, of_any_sizes):
    facts, (first, second), single = of_any_sizes
    assert max(differences(first, single, case, same).values()) < 1e-5
    assert differences(first, second, case)["variables"] == 0
    assert (facts[case]["iterations"], facts[case]["examples"]) == (36, 36 * 16)
    examples = [worker["examples"] for worker in facts[case]["workers"].values()]
    assert sum(examples) == 36 * 16
    assert examples[0] != examples[1]


@pytest.mark.parametrize(("stopped_by", "reason"), [("SIGKILL", "connection"), ("SIGSTOP", "no answer for 1")])
def test_without_a_launcher_workers_exit_if_another_one_is_lost(stopped_by, reason, module_cluster):
    tasks = module_cluster(worker=3)
    tasks.start(program("endless.py"))
    tasks.await_text("worker:0", "trains")
    tasks.processes["worker:2"].send_signal(signal.Signals[stopped_by])
    for task in ("worker:0", "worker:1"):
        assert tasks.processes[task].wait(60) == 1
    written = tasks.result_of("worker:0").err + tasks.result_of("worker:1").err
    assert re.search(rf"TaskLost: worker:2 .*{reason}", written)
    tasks.processes["worker:2"].kill()


@pytest.fixture(scope="module")
def facts(module_cluster):
    """The results of a chief and a worker, by fact."""
    tasks = module_cluster(chief=1, worker=1)
    names = [
        "counts",
        "validation",
        "callbacks",
        "chiefs_callbacks",
        "untrained",
        "scored_batches",
        "backup",
        "resumed",
        "refused",
        "wires",
        "overflow",
    ]
    ended = tasks.start(program("facts.py", *names)).finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    assert tasks.leftover_processes() == []
    return {task: dict(one.result) for task, one in ended.items()}


TASKS = ("chief:0", "worker:0")


def test_steps_and_examples_are_counted_exactly(facts):
    assert facts["chief:0"]["counts"] == [203, 2 * 203 * 7, 3]


@pytest.mark.parametrize("task", TASKS)
def test_validation_scores_each_example_once(task, facts):
    examples, loss, own_loss, limited, after, loss_after = facts[task]["validation"]
    assert examples == 61
    assert loss == pytest.approx(own_loss, rel=1e-5)
    assert limited == 5 * 7
    assert after == 61
    assert loss_after == pytest.approx(own_loss, rel=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_callbacks_of_the_chief_reach_all_workers(task, facts):
    found = facts[task]["callbacks"]
    assert found["epochs"] == 2
    assert found["own rate"] == 0.01
    assert found["own reduced"] == 0.005
    assert found["weights"] == facts["chief:0"]["callbacks"]["weights"]


def test_callbacks_run_on_the_chief(facts):
    assert facts["chief:0"]["callbacks"]["rates"] == [0.02, 0.01]
    assert facts["chief:0"]["callbacks"]["reduced"] == [0.02, 0.01, 0.005]
    assert facts["worker:0"]["callbacks"]["rates"] == []


def test_callbacks_may_be_given_to_the_chief_alone(facts):
    steps, same, weights = facts["chief:0"]["chiefs_callbacks"]
    assert (steps, same) == (12, True)
    assert facts["worker:0"]["chiefs_callbacks"] == [0, None, weights]  # with the rates that the chief has set


@pytest.mark.parametrize("task", TASKS)
def test_what_a_callback_of_the_chief_assigns_at_a_batch_reaches_all_workers(task, facts):
    found = facts[task]["untrained"]
    assert [[share, stayed] for share, stayed, _ in found] == [[7.0, True]] * 2
    assert found == facts["chief:0"]["untrained"]


def test_a_callback_of_the_chief_is_called_for_each_batch_of_the_validation(facts):
    begun, ended, examples = facts["chief:0"]["scored_batches"]
    assert begun == [0, 1, 2, 3, 4]  # the chief has 5 of 9 batches, the worker 4
    assert ended == [[0, 14], [1, 28], [2, 42], [3, 56], [4, 61]]
    assert examples == facts["worker:0"]["scored_batches"][2] == [61]


def test_all_continue_from_the_variables_that_a_callback_of_the_chief_restored(facts):
    assert facts["chief:0"]["backup"] == facts["worker:0"]["backup"]
    assert facts["chief:0"]["backup"][:2] == [[2], 18]


def test_all_resume_at_the_exact_step_from_a_folder_of_the_chief_alone(facts):
    iterations, examples, kept, rate, weights = facts["chief:0"]["resumed"]
    assert (iterations, rate) == (61, 0.01)
    assert examples == [2 * 23 * 7, 2 * 50 * 7, 2 * 11 * 7]  # the first epoch was cut short, then finished
    assert kept == ["step-00000050", "step-00000060", "step-00000061"]
    iterations, _, kept, rate, workers_weights = facts["worker:0"]["resumed"]
    assert (iterations, kept, rate) == (61, [], 0.01)
    assert workers_weights == weights


@pytest.mark.parametrize("task", TASKS)
def test_errors_of_a_training_have_codes(task, facts):
    accumulation, not_finite, outside = facts[task]["refused"]
    assert accumulation is None
    assert not_finite[0] == "loss-not-finite"
    assert re.search(r"(nan|inf) at step \d+ .*all workers", not_finite[1])
    assert outside[0] == "created-outside-scope"
    assert "'adam" in outside[1]


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_digits_are_learned_as_well_over_a_narrow_wire(wire, facts):
    accuracy, weights = facts["chief:0"]["wires"][wire]
    plain, _ = facts["chief:0"]["wires"]["float32"]
    assert plain > 0.9
    assert accuracy == pytest.approx(plain, abs=0.01)
    assert facts["worker:0"]["wires"][wire][1] == weights


@pytest.mark.parametrize("task", TASKS)
def test_an_overflow_of_the_wire_names_the_step_and_the_fix(task, facts):
    overflow, wider, scaled = facts[task]["overflow"]
    assert overflow[0] == "wire-overflow"
    assert "step 1 " in overflow[1]
    assert "wire: bfloat16" in overflow[1]
    assert wider is None
    assert scaled is None
