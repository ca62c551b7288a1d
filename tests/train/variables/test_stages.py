"""Variables move to the workers of their layers."""

from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf

from tfdist_cli.train.variables import stages as module
from tfdist_cli.train.variables.placement import PlacementRules
from tfdist_cli.train.variables.stages import Stages


@pytest.fixture
def stages(monkeypatch):
    """Two stages, which are this process while variables are created, and are named `w0` and `w1` from then on."""
    device = tf.config.list_logical_devices("CPU")[0].name
    monkeypatch.setattr(module, "CHIEF_DEVICE", device)
    monkeypatch.setattr(module, "_device", lambda _: device)
    strategy = tf.distribute.OneDeviceStrategy(device)
    made: Any = Stages(strategy, 2)
    made.set_rules(PlacementRules(stages=2))
    with strategy.scope():
        made.layers = [keras.layers.Dense(3, use_bias=False) for _ in range(4)]
        for layer in made.layers:
            layer.build((None, 3))
        made.optimizer = keras.optimizers.SGD(momentum=0.9)
        made.optimizer.build([layer.kernel for layer in made.layers])
        made.foreign = tf.Variable([1.0])
    made.moved = []
    monkeypatch.setattr(module, "move_variable", lambda variable, to: made.moved.append((variable, to)))
    made._workers = ["w0", "w1"]
    return made


def test_a_variable_moves_with_its_slots_to_the_worker_that_holds_the_least(stages):
    stages.assign([(layer, number // 2) for number, layer in enumerate(stages.layers)])
    assert [to for _, to in stages.moved] == ["w0", "w0", "w1", "w1"] * 2
    slots = dict(zip((layer.kernel.path for layer in stages.layers), stages.optimizer.variables[2:], strict=True))
    expected = [stages.layers[number].kernel for number in (0, 2, 1, 3)]
    pairs = [each.value for kernel in expected for each in (kernel, slots[kernel.path])]
    assert all(moved is one for (moved, _), one in zip(stages.moved, pairs, strict=True))


def test_a_variable_that_keras_has_not_created_stays(stages):
    """The function of a SavedModel has captured its storage."""
    stages.assign([(SimpleNamespace(weights=[SimpleNamespace(value=stages.foreign)]), 1)])
    assert stages.moved == []


def test_a_gradient_is_computed_where_its_innermost_layer_is(stages):
    name = "gradient_tape/encoder/tfdist_worker_1/dense/tfdist_worker_0/MatMul"
    assert stages._choose(SimpleNamespace(name=name, device="", inputs=[])) == "w0"
