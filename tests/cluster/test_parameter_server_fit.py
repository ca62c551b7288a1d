"""Counts, callbacks, validation and checkpoints of a training on parameter servers."""

import os
import re

import pytest

from tests.support.selected import selected
from tests.support.tasks import program

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(700)]

RUNS = int(os.environ.get("TFDIST_TEST_RUNS", "1"))
"""How many times the counts, which must hold in every run, are tested."""


def on(day, fact):
    """Runs a test of one fact, which the cluster then finds out, on one day of five."""
    return lambda test: pytest.mark.rotates(5, day)(pytest.mark.parametrize("fact", [fact])(test))


@pytest.fixture(scope="module")
def facts(request, module_cluster):
    """The results of 3 workers, by fact; the ps and the workers exit after the chief."""
    tasks = module_cluster(chief=1, ps=1, worker=3)
    names = ["counts"] * RUNS + selected(request, "fact")
    ended = tasks.start(program("facts.py", *names)).finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    assert tasks.leftover_processes() == []
    assert "retracing" not in ended["chief:0"].err
    found = {name: [] for name in names}
    for name, fact in ended["chief:0"].result:
        found[name].append(fact)
    return found


@pytest.mark.rotates(1)
def test_steps_updates_and_examples_are_counted_exactly(facts):
    assert facts["counts"] == [[203, 203 * 7, 3]] * RUNS


@on(3, "validation")
def test_validation_scores_each_example_once(fact, facts):
    ((examples, loss, own_loss, limited, after, loss_after),) = facts[fact]
    assert examples == 61
    assert loss == pytest.approx(own_loss, rel=1e-5)
    assert limited == 5 * 7
    assert after == 61
    assert loss_after == pytest.approx(own_loss, rel=1e-5)


@on(0, "callbacks")
def test_callbacks_act_on_the_training(fact, facts):
    (found,) = facts[fact]
    assert found["epochs"] == 2
    assert found["rates"] == [0.02, 0.01]
    assert found["reduced"] == [0.02, 0.01, 0.005]


@on(4, "untrained")
def test_variables_that_no_step_assigns_keep_the_value_that_a_callback_assigns(fact, facts):
    ((asynchronous, synchronous),) = facts[fact]
    assert asynchronous[:2] == synchronous[:2] == [7.0, True]


def check_assigned_values(found):
    numbers, last, kept, read = found
    assert (numbers, last) == ([float(step) for step in range(len(numbers))], len(numbers))
    assert all(kept)
    assert all(read)


@on(2, "assigned_values")
def test_workers_train_with_what_a_callback_assigns_and_what_it_has_read_stays(fact, facts):
    (found,) = facts[fact]
    check_assigned_values(found)


@pytest.mark.rotates(5, 2)
def test_so_does_a_single_worker(cluster):
    tasks = cluster(chief=1, ps=1, worker=1)
    ended = tasks.start(program("facts.py", "assigned_values")).finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    ((_, found),) = ended["chief:0"].result
    check_assigned_values(found)


@on(1, "chiefs_callbacks")
def test_callbacks_on_batches_are_called_for_every_step(fact, facts):
    ((steps, same, _),) = facts[fact]
    assert (steps, same) == (12, True)


@on(4, "scored_batches")
def test_callbacks_are_called_for_each_batch_of_the_validation(fact, facts):
    ((begun, ended, examples),) = facts[fact]
    assert begun == list(range(9))
    assert ended == [[batch, min(61, 7 * (batch + 1))] for batch in range(9)]
    assert examples == [61]


@on(1, "backup")
def test_training_continues_from_the_variables_that_a_callback_restored(fact, facts):
    ((epochs, iterations, _),) = facts[fact]
    assert (epochs, iterations) == ([2], 18)


@on(0, "resumed")
def test_training_resumes_at_the_exact_step(fact, facts):
    ((iterations, examples, kept, rate, _),) = facts[fact]
    assert iterations == 61
    assert examples == [23 * 7, 50 * 7, 11 * 7]  # the first epoch was cut short, then finished
    assert kept == ["step-00000050", "step-00000060", "step-00000061"]
    assert rate == 0.01


@on(2, "again")
def test_a_second_training_traces_nothing_until_the_model_is_compiled(fact, facts):
    ((*modes,),) = facts[fact]
    assert len(modes) == 3
    for (trainings, _), workers in zip(modes, (1, 3, 3), strict=True):
        examples = 12 * 7 * workers
        assert trainings == [
            [[True, False], 36, [examples] * 3, [61] * 3, 61],
            [[False, False], 60, [examples] * 2, [61] * 2, 61],
            [[True, False], 36, [examples] * 3, [61] * 3, 61],
        ]


@on(3, "refused")
def test_errors_of_a_training_have_codes(fact, facts):
    ((accumulation, not_finite, outside),) = facts[fact]
    assert accumulation[0] == "accumulation-needs-synchronous-workers"
    assert "steps is 2" in accumulation[1]
    assert not_finite[0] == "loss-not-finite"
    assert re.search(r"(nan|inf) at step \d+ .*worker:\d", not_finite[1])
    assert outside[0] == "created-outside-scope"
    assert "'adam" in outside[1]


@on(4, "datasets")
def test_a_dataset_is_sent_to_the_workers(fact, facts):
    ((examples, scored, outside, whole, predicted),) = facts[fact]
    assert examples == [350, 350]
    assert scored == [21, 21]
    assert [code for code, _ in (outside, whole, predicted)] == [
        "dataset-outside-function",
        "shard-ignored",
        "python-code-in-data",
    ]
    assert "3 workers" in whole[1]
    assert "tfdist.predict(model, lambda shard" in predicted[1]


@on(1, "generators")
def test_a_generator_on_the_chief_feeds_the_workers_in_several_trainings(fact, facts):
    ((trained, limited, trained_again, whole, trained_by_chief, whole_by_chief, passes),) = facts[fact]
    assert trained == trained_again == trained_by_chief == [15 * 7] * 2
    assert limited == [9 * 7] * 2
    assert whole == whole_by_chief == passes == [350, 350]


@on(3, "after_failure")
def test_a_failed_training_does_not_affect_the_next_one(fact, facts):
    (((code, message), examples),) = facts[fact]
    assert code == "data-ended-early"
    assert re.match(r"worker:\d", message)
    assert examples == [9 * 7]


@on(2, "rare_pushes")
def test_workers_may_push_rarely(fact, facts):
    assert facts[fact] == [[2, [80 * 7]]]


@on(0, "broken_off")
def test_a_synchronous_training_may_be_aborted(fact, facts):
    assert facts[fact] == [["enough", 50, [3 * 50 * 7]]]
