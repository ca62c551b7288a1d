"""TensorFlow's eager context: what is private is there, and there is no public way."""

import inspect

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
