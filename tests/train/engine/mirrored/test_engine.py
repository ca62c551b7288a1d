"""One process trains as `keras.Model.fit` does, whatever the optimizer."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_cli as tfdist
from tests.support.compare import assert_same, batches, classifier, train_both
from tests.support.optimizers import OPTIMIZERS
from tfdist_cli.train.engine import unrolling
from tfdist_cli.train.engine.mirrored.engine import MirroredEngine


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_kerass(name):
    plain, ours = train_both(lambda: classifier(optimizer=OPTIMIZERS[name]()))
    assert_same(plain, ours, tolerance=3e-6)


@pytest.mark.slow
def test_training_that_starts_with_single_steps_equals_kerass(monkeypatch):
    built: list[int] = []
    build = MirroredEngine._execution_function

    def recorded(self, count):
        built.append(count)
        return build(self, count)

    monkeypatch.setattr(MirroredEngine, "_execution_function", recorded)
    monkeypatch.setattr(MirroredEngine, "max_steps_per_execution", 6)
    monkeypatch.setattr(unrolling, "FIRST_OPERATIONS", 1)
    monkeypatch.setattr(unrolling, "_STEPS_TO_SAVE", 1e-6)
    plain, ours = train_both(lambda: classifier(keras.layers.Dropout(0.5)), steps_per_execution=None)
    assert_same(plain, ours)
    assert built == [1, 6]


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lion", "nadam"])
def test_copied_steps_equal_traced_ones_to_the_bit(monkeypatch, optimizer):
    """Also with random layers, moving averages, and updates by Keras's own operations."""

    def build():
        layers = keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)
        return classifier(*layers, optimizer=optimizer)

    def trained():
        keras.utils.set_random_seed(7)
        model = build()
        tfdist.fit(model, batches(), epochs=2, steps_per_execution=5)
        return model

    copies, found = trained(), []
    monkeypatch.setattr(MirroredEngine, "_copies_steps", property(lambda _: found.append(1)))
    traced = trained()
    assert found
    for one, other in zip(
        copies.variables + copies.optimizer.variables, traced.variables + traced.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(one.numpy(), other.numpy(), err_msg=one.path)
    for name, reported in copies.history.history.items():  # TensorFlow may sum a loss in another order
        np.testing.assert_allclose(reported, traced.history.history[name], rtol=1e-6)


@pytest.mark.slow
def test_an_epoch_shares_only_what_callbacks_have_assigned(monkeypatch):
    """All variables, several times the size of the model, would cross the network in each epoch."""
    shared = []
    monkeypatch.setattr(MirroredEngine, "share_variables", lambda self: shared.append("all"))
    monkeypatch.setattr(MirroredEngine, "share_changes", lambda self: shared.append("changes"))
    tfdist.fit(classifier(), batches(), epochs=3, callbacks=[keras.callbacks.LambdaCallback()])
    # Once; what a checkpoint has restored, at the beginning of each epoch, and after on_train_end.
    assert shared == ["all"] + ["changes"] * 5


class Noise(keras.layers.Layer):
    """Adds what TensorFlow draws from the seed of the process."""

    def call(self, x):
        noise = tf.random.normal([])
        drawn = tf.print(noise, output_stream=f"file://{self.file}")
        with tf.control_dependencies([drawn]):
            return x + noise


@pytest.mark.slow
def test_steps_draw_different_numbers_from_a_seed(tmp_path):
    noise = Noise()
    noise.file = str(tmp_path / "drawn")
    keras.utils.set_random_seed(3)
    tfdist.fit(classifier(noise), batches(), epochs=1, steps_per_epoch=5, steps_per_execution=5)
    drawn = Path(noise.file).read_text().split()
    assert len(drawn) >= 5
    assert len(set(drawn)) == len(drawn)
