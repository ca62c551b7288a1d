"""Models with a `train_step` of their own train on two workers as `keras.Model.fit` trains them in one process."""

import numpy as np
import pytest
import tensorflow as tf

from tests.support.tasks import alone, program

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(700), pytest.mark.rotates(5, 0)]

CASES = ("gan", "critic_gan", "spectral_gan", "distiller", "averaged", "own", "annealed", "stateful")


@pytest.fixture(scope="module")
def keras_own(tmp_path_factory):
    ended = alone(tmp_path_factory.mktemp("alone"), program("own_steps.py", "-", *CASES))
    assert ended.code == 0, ended.err
    return ended.result


def trained(tasks, mode, *cases):
    """The results of the first task."""
    ended = tasks.start(program("own_steps.py", mode, *cases)).finish()
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    return ended[tasks.tasks[0]].result


def assert_equal(ours, kerass):
    assert {name: list(group) for name, group in ours["history"].items()}.keys() == kerass["history"].keys()
    for part in ("weights", "optimizers", "history"):
        pairs = zip(tf.nest.flatten(ours[part]), tf.nest.flatten(kerass[part]), strict=True)
        assert max(abs(one - other) / (1 + abs(other)) for one, other in pairs) < 1e-5, part


def test_two_mirrored_workers_equal_one_process(module_cluster, keras_own):
    found = trained(module_cluster(worker=2), "async", *CASES)
    for case in CASES:
        assert_equal(found[case], keras_own[case])


def test_two_workers_of_parameter_servers(module_cluster, keras_own):
    """In step they equal one process; each by itself, they make all updates of a step."""
    tasks = module_cluster(chief=1, ps=2, worker=2)
    together = trained(tasks, "sync", *CASES)
    assert together.pop("stateful") == {"refused": "stateful-layer"}
    for case in together:
        assert_equal(together[case], keras_own[case])
    apart = trained(tasks, "async", "gan", "critic_gan", "spectral_gan")
    assert apart["spectral_gan"] == {"refused": "assigns-trainable-variable"}
    steps = 2 * 12
    assert updates(apart["gan"]) == (steps, steps)
    assert updates(apart["critic_gan"]) == (2 * steps, steps)
    assert np.isfinite(tf.nest.flatten(apart["gan"]["weights"])).all()
    assert abs(apart["gan"]["history"]["d_loss"][0] - keras_own["gan"]["history"]["d_loss"][0]) < 0.3


def updates(found):
    """How many updates each of the optimizers has made: the first variable of each is its count."""
    counts = [value for value in found["optimizers"] if isinstance(value, int)]
    return tuple(counts[1:])  # the compiled optimizer is not used
