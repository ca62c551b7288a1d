"""One process trains as `keras.Model.fit` does, whatever the optimizer."""

import keras
import pytest

from tests.support.compare import assert_same, classifier, train_both
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
