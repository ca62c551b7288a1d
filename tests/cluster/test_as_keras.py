"""Two workers train as `keras.Model.fit` does in one process with their batches together, whatever the model."""

import json
import re

import pytest
import tensorflow as tf

from tests.support.selected import selected
from tests.support.tasks import alone, program

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(700)]

ENGINES = {"mirrored": {"worker": 2}, "sync": {"chief": 1, "ps": 1, "worker": 2}}
LOSSES = (
    "a mean",
    "a mean with weights",
    "a weighted sum",
    "a sum",
    "no reduction",
    "a compute_loss of its own",
    "losses of layers",
    "several outputs",
    "distillation",
    "float16",
)
CALLBACKS = (
    "annealing",
    "a training that resumes",
    "metrics in hooks",
    "averages in the place of weights",
    "averages after each epoch",
    "other weights to score",
    "state",
    "state of scores",
    "predictions",
    "a callback of its own",
)
HOOKS = "hooks of scores"


@pytest.fixture(scope="module")
def keras_own(request, tmp_path_factory):
    """The results of `keras.Model.fit`, by case."""
    ended = alone(tmp_path_factory.mktemp("alone"), program("as_keras.py", "sync", *selected(request, "case"), HOOKS))
    assert ended.code == 0, ended.err
    return ended.result


@pytest.fixture(scope="module", params=ENGINES)
def programs(request, module_cluster):
    """The results of all tasks of a cluster that run the program to its end, the chief first; each by case."""
    tasks = module_cluster(**ENGINES[request.param])
    ended = tasks.start(program("as_keras.py", "sync", *selected(request, "case"), "refused", "nested", HOOKS)).finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    return [one.result for one in ended.values() if one.out]


@pytest.fixture(scope="module")
def chief(programs):
    """The results of the chief of a cluster, by case."""
    return programs[0]


@pytest.mark.rotates(5, by="case")
@pytest.mark.parametrize("case", LOSSES)
def test_the_loss_of_two_workers_is_that_of_their_batches_together(case, chief, keras_own):
    assert_equal(chief[case], keras_own[case], 1e-3 if case == "float16" else 1e-5)


@pytest.mark.rotates(5, by="case")
@pytest.mark.parametrize("case", CALLBACKS)
def test_callbacks_and_state_are_as_in_one_process(case, chief, keras_own):
    assert_equal(chief[case], keras_own[case], 1e-5)


def test_callbacks_of_scores_run_on_the_chief_and_their_weights_on_all_tasks(programs, keras_own):
    ours, *others = (each[HOOKS] for each in programs)
    expected = keras_own[HOOKS]
    batches = len(expected["tested"])
    assert ours["tested"] in ([*range(batches)], [*range(batches // 2)])  # mirrored workers take two at once
    assert_equal(ours | {"tested": expected["tested"]}, expected, 1e-5)
    for other in others:
        assert other["tested"] == other["predicted"] == []
        assert other["after"] == ours["after"]


def test_what_keras_cannot_do_on_a_cluster_names_the_call_to_use(chief):
    fit, train_on_batch, predict = chief["refused"]
    assert (fit[0], train_on_batch[0], predict[0]) == (
        "keras-fit-on-cluster",
        "keras-fit-on-cluster",
        "model-not-built",
    )
    assert re.match(r"model\.fit .*tfdist\.fit\(model, data", fit[1])
    assert train_on_batch[1].startswith("model.train_on_batch")
    assert re.search(r"'sequential\w*' .* predict .* tfdist\.scope\(\)", predict[1])


def test_a_call_that_needs_all_tasks_is_refused_in_a_callback_of_mirrored_workers(chief, request):
    mirrored = request.node.callspec.params["programs"] == "mirrored"
    noted, after = chief["nested"]["noted"], chief["nested"]["after"]
    assert [found for found, _ in noted] == (
        ["call-needs-all-tasks"] * 2 if mirrored else pytest.approx([own for _, own in noted], rel=1e-5)
    )
    assert after == pytest.approx(noted[-1][1], rel=1e-5)


def assert_equal(ours, kerass, tolerance):
    """The same numbers under the same names."""
    assert ours.keys() == kerass.keys()
    for name, values in kerass.items():
        pairs = zip(tf.nest.flatten(ours[name]), tf.nest.flatten(values), strict=True)
        worst = max(abs(one - other) / (1 + abs(other)) for one, other in pairs)
        assert worst < tolerance, f"{name}: {json.dumps(ours[name])} for {json.dumps(values)}"
