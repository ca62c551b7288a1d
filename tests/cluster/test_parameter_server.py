"""Training on parameter servers: what one worker does equals one process, and what several do is counted exactly."""

import os
import re

import numpy as np
import pytest

from tests.support.comparing import differences
from tests.support.tasks import alone, program

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(700)]

RUNS = int(os.environ.get("TFDIST_TEST_RUNS", "1"))
"""How often what must hold in every run is tried."""
RECIPES = ("sgd", "momentum", "adam", "adagrad", "everything", "accumulation", "float16", "gradients", "frozen")


@pytest.fixture(scope="module")
def one_worker(module_cluster, tmp_path_factory):
    """What 1 worker and 2 ps came to, and what one process came to, by recipe."""
    tasks = module_cluster(chief=1, ps=2, worker=1)
    folder = tmp_path_factory.mktemp("alone")
    command = program("equivalence.py", "out", 16, *RECIPES)
    tasks.start(command)
    single = alone(folder, command)
    assert single.code == 0, single.err
    ended = tasks.finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    return np.load(tasks.folder / "out.npz"), np.load(folder / "out.npz")


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_worker_equals_one_process(recipe, one_worker):
    some, others = one_worker
    worst = differences(some, others, recipe)
    assert worst["variables"] < 1e-5
    assert worst["history"] < 1e-5


def test_two_workers_that_take_turns_equal_one_process(cluster, tmp_path):
    tasks = cluster(chief=1, ps=2, worker=2)
    command = program("equivalence.py", "out", 480, "sgd", "adam", "everything")
    ended = tasks.start(command).finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    single = alone(tmp_path, command)
    assert single.code == 0, single.err
    for recipe in ("sgd", "adam", "everything"):
        worst = differences(np.load(tasks.folder / "out.npz"), np.load(tmp_path / "out.npz"), recipe)
        assert worst["variables"] < 1e-5
        assert worst["history"] < 1e-5


@pytest.fixture(scope="module")
def facts(module_cluster):
    """What 3 workers came to, by fact; the ps and the workers are ended by the chief's end."""
    tasks = module_cluster(chief=1, ps=1, worker=3)
    names = ["counts"] * RUNS + ["generators", "validation", "callbacks", "chiefs_callbacks", "resumed", "refused"]
    names += ["untrained", "scored_batches", "backup", "datasets", "after_failure", "rare_pushes", "broken_off"]
    ended = tasks.start(program("facts.py", *names)).finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    assert tasks.leftover_processes() == []
    assert "retracing" not in ended["chief:0"].err
    found = {name: [] for name in names}
    for name, fact in ended["chief:0"].result:
        found[name].append(fact)
    return found


def test_steps_updates_and_examples_are_counted_exactly(facts):
    assert facts["counts"] == [[203, 203 * 7, 3]] * RUNS


def test_validation_scores_each_example_once(facts):
    ((examples, loss, own_loss, limited, after, loss_after),) = facts["validation"]
    assert examples == 61
    assert loss == pytest.approx(own_loss, rel=1e-5)
    assert limited == 5 * 7
    assert after == 61
    assert loss_after == pytest.approx(own_loss, rel=1e-5)


def test_callbacks_act_on_the_training(facts):
    (found,) = facts["callbacks"]
    assert found["epochs"] == 2
    assert found["rates"] == [0.02, 0.01]
    assert found["reduced"] == [0.02, 0.01, 0.005]


def test_what_no_step_assigns_is_what_a_callback_makes_it(facts):
    ((asynchronous, synchronous),) = facts["untrained"]
    assert asynchronous[:2] == synchronous[:2] == [7.0, True]


def test_callbacks_on_batches_are_called_for_every_step(facts):
    ((steps, same, _),) = facts["chiefs_callbacks"]
    assert (steps, same) == (12, True)


def test_callbacks_are_told_of_each_batch_of_the_validation(facts):
    ((begun, ended, examples),) = facts["scored_batches"]
    assert begun == list(range(9))
    assert ended == [[batch, min(61, 7 * (batch + 1))] for batch in range(9)]
    assert examples == [61]


def test_training_goes_on_from_what_a_callback_has_restored(facts):
    ((epochs, iterations, _),) = facts["backup"]
    assert (epochs, iterations) == ([2], 18)


def test_training_resumes_at_the_exact_step(facts):
    ((iterations, examples, kept, rate, _),) = facts["resumed"]
    assert iterations == 61
    assert examples == [23 * 7, 50 * 7, 11 * 7]  # the first epoch was cut short, then finished
    assert kept == ["step-00000050", "step-00000060", "step-00000061"]
    assert rate == 0.01


def test_what_cannot_be_done_is_said(facts):
    ((accumulation, not_a_number, outside),) = facts["refused"]
    assert "gradient_accumulation_steps is 2" in accumulation
    assert re.search(r"the loss is (nan|inf) at step \d+ \(taken by worker:\d\)", not_a_number)
    assert re.search(r"^created-outside-scope: .*'adam\w*'", outside)


def test_a_dataset_is_sent_to_the_workers(facts):
    ((examples, scored, generated, outside, whole),) = facts["datasets"]
    assert examples == [350, 350]
    assert scored == [21, 21]
    assert "py_function, numpy_function, from_generator" in generated
    assert "lambda shard: make_dataset().shard(shard.count, shard.index)" in generated
    assert "3 workers" in whole
    assert outside.startswith("the data function takes a dataset that was made outside of it")


def test_a_generator_of_the_chiefs_feeds_the_workers_and_other_trainings_follow(facts):
    ((trained, limited, trained_again, whole),) = facts["generators"]
    assert trained == trained_again == [15 * 7] * 2
    assert limited == [9 * 7] * 2
    assert whole == [350, 350]


def test_a_failed_training_leaves_nothing_to_the_next_one(facts):
    ((said, examples),) = facts["after_failure"]
    assert re.match(r"worker:\d's data ended before the training did", said)
    assert examples == [9 * 7]


def test_workers_may_push_rarely(facts):
    assert facts["rare_pushes"] == [[2, [80 * 7]]]


def test_a_synchronous_training_may_be_broken_off(facts):
    assert facts["broken_off"] == [["enough", 50, [3 * 50 * 7]]]
