"""TensorFlow's eager context: what is private is there, and there is no public way."""

import inspect
from unittest.mock import Mock

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tests.support.running import output_of
from tfdist_cli.train.tf_compat import eager_context


@pytest.mark.slow
@pytest.mark.parametrize("program", ["tf_compat_configuration", "tf_compat_eager_context"])
def test_in_a_process_of_its_own(program):
    assert output_of(program) == "done"


def test_the_configuration_before_there_are_devices():
    tf.constant(1)
    assert eager_context.is_initialized()
    assert not hasattr(tf.config, "is_initialized")
    assert isinstance(eager_context.gpu_options(), tf.compat.v1.GPUOptions)


def test_a_process_without_a_cluster_has_no_addresses():
    assert eager_context.cluster_addresses() == []


def test_without_a_coordination_service_no_notice_of_sigterm_comes():
    assert not eager_context.await_sigterm_notice(60)
    assert not hasattr(tf.config, "get_config_key_value")


def test_the_seed_can_be_set_in_public_and_not_be_read():
    before = eager_context.global_seed()
    tf.random.set_seed(7)
    try:
        assert eager_context.global_seed() == 7
    finally:
        tf.random.set_seed(before)
    assert [name for name in dir(tf.random) if "seed" in name] == ["set_seed"]


def drawn():
    return tf.random.uniform([3]).numpy().tolist()


def test_seeds_start_again_and_go_on_afterwards():
    tf.random.set_seed(7)
    try:
        drawn()
        following = drawn()
        tf.random.set_seed(7)
        drawn()
        with eager_context.restarted_seeds(4) as were_drawn:
            assert not were_drawn()
            first = drawn()
            assert were_drawn()
        with eager_context.restarted_seeds(4):
            assert drawn() == first
        assert drawn() == following
        assert eager_context.global_seed() == 7
    finally:
        tf.random.set_seed(None)


RANDOM = [
    lambda: tf.random.uniform([3]),
    lambda: tf.random.uniform([3], maxval=100, dtype=tf.int32),
    lambda: tf.random.normal([2, 2], dtype=tf.float64),
    lambda: tf.random.truncated_normal([3]),
    lambda: tf.random.shuffle(tf.range(20)),
    lambda: tf.random.categorical([[0.5, 0.2, 0.3]], 5),
    lambda: tf.random.gamma([2], [0.5, 1.5]),
    lambda: tf.random.poisson([2], [3.0]),
    lambda: tf.compat.v1.random.multinomial([[0.5, 0.5]], 4),
    lambda: tf.random.uniform([3], seed=5),
]


@pytest.mark.parametrize("draw", RANDOM)
def test_operations_draw_what_they_would_after_the_seed_is_set(draw):
    tf.random.set_seed(4)
    try:
        expected = [draw().numpy().tolist() for _ in range(3)]
        tf.random.set_seed(7)
        for _ in range(2):
            with eager_context.restarted_seeds(4):
                assert [draw().numpy().tolist() for _ in range(3)] == expected
    finally:
        tf.random.set_seed(None)


def test_operations_in_functions_stay_what_they_are():
    with eager_context.restarted_seeds(4):
        drawn = tf.function(lambda: tf.random.uniform([3]))
        assert "RandomUniform" in {each.type for each in drawn.get_concrete_function().graph.get_operations()}


def test_other_threads_may_run_functions_that_wait_for_this_one(monkeypatch):
    """TensorFlow drops kernels when a seed is set, and waits for such functions while it holds the interpreter."""
    dropped = Mock()
    tf.random.set_seed(7)
    monkeypatch.setattr(context.pywrap_tfe, "TFE_ContextClearCaches", dropped)
    tf.random.set_seed(7)
    assert dropped.call_count == 1
    with eager_context.restarted_seeds(4):
        drawn()
        tf.random.set_seed(2)
    with eager_context.global_seed_of(None):
        drawn()
    assert dropped.call_count == 1
    monkeypatch.undo()
    tf.random.set_seed(None)


def test_without_a_seed_nothing_starts_again():
    tf.random.set_seed(None)
    with eager_context.restarted_seeds(4) as were_drawn:
        assert drawn() != drawn()
        assert not were_drawn()
        tf.random.set_seed(2)
    assert eager_context.global_seed() is None


def test_functions_that_nobody_needs_stay_registered(monkeypatch):
    here = context.context()
    removed = type(here).remove_function
    assert callable(removed)
    monkeypatch.setattr(here, "remove_function", removed.__get__(here))
    eager_context.keep_remote_functions()
    assert here.remove_function("no such function") is None


def test_the_strategy_takes_no_timeout():
    arguments = inspect.signature(tf.distribute.MultiWorkerMirroredStrategy).parameters
    assert set(arguments) == {"cluster_resolver", "communication_options"}
    for name in (
        "configure_coordination_service",
        "set_config_key_value",
        "get_config_key_value",
        "check_collective_ops_peer_health",
    ):
        assert callable(getattr(context.Context, name))
