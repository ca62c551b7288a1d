"""Counts, callbacks, validation and checkpoints of a training by mirrored workers."""

import re

import numpy as np
import pytest

from tests.support.tasks import alone, program

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(700), pytest.mark.rotates(5, 4)]


@pytest.fixture(scope="module")
def facts(module_cluster):
    """The results of a chief and a worker, by fact."""
    tasks = module_cluster(chief=1, worker=1)
    names = ["counts", "validation", "callbacks", "chiefs_callbacks", "untrained", "scored_batches"]
    names += [
        "backup",
        "resumed",
        "drawn",
        "again",
        "refused",
        "own_arrays",
        "own_weights",
        "wires",
        "overflow",
        "weight_types",
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


def test_all_workers_begin_with_the_chiefs_weights(facts):
    """A program may load weights on one task alone."""
    chief, worker = (facts[task]["own_weights"] for task in TASKS)
    assert chief == worker


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


def test_a_training_that_resumes_draws_what_one_without_interruption_draws(facts):
    whole, resumed = facts["chief:0"]["drawn"]
    assert whole == resumed
    assert facts["worker:0"]["drawn"] == [whole, resumed]


def test_a_second_training_traces_nothing_until_the_model_is_compiled(facts):
    assert facts["chief:0"]["again"] == facts["worker:0"]["again"]
    for trainings, _ in facts["chief:0"]["again"]:
        assert trainings == [
            [[True, False], 36, [12 * 14] * 3, [61] * 3, 61],
            [[False, False], 60, [12 * 14] * 2, [61] * 2, 61],
            [[True, False], 36, [12 * 14] * 3, [61] * 3, 61],
        ]


@pytest.mark.parametrize("task", TASKS)
def test_errors_of_a_training_have_codes(task, facts):
    accumulation, not_finite, outside = facts[task]["refused"]
    assert accumulation is None
    assert not_finite[0] == "loss-not-finite"
    assert re.search(r"(nan|inf) at step \d+ .*all workers", not_finite[1])
    assert outside[0] == "created-outside-scope"
    assert "'adam" in outside[1]


def test_tasks_with_arrays_of_their_own_do_not_divide_them(facts):
    (chiefs, chiefs_order), (workers, workers_order) = (facts[task]["own_arrays"] for task in TASKS)
    assert chiefs == workers == ["arrays-differ"] * 4 + [None]
    assert chiefs_order == workers_order != sorted(chiefs_order)


def test_weights_of_any_type_begin_with_the_chiefs_values_and_train_as_in_one_process(facts, tmp_path):
    """They are int8 (also quantized, with LoRA), uint32 and bfloat16; the training continues from a checkpoint."""
    one = alone(tmp_path, program("facts.py", "weight_types"))
    assert one.code == 0, one.err
    single = dict(one.result)["weight_types"]
    chief, worker = (facts[task]["weight_types"] for task in TASKS)
    assert chief == worker
    assert {"bfloat16", "int8", "uint32"} < set(chief["types"])
    assert (chief["begun"], chief["calls"]) == (single["begun"], 40)
    assert chief["loss"] == pytest.approx(single["loss"], rel=5e-2)
    for name in ("trained", "predicted"):
        found, expected = (np.hstack(each[name]) for each in (chief, single))
        np.testing.assert_allclose(found, expected, rtol=5e-2, atol=5e-2, err_msg=name)


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
