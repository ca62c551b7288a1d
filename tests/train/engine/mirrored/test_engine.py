"""One process trains as `keras.Model.fit` does, whatever the optimizer."""

import pytest

from tests.support.compare import assert_same, classifier, train_both
from tests.support.optimizers import OPTIMIZERS


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_kerass(name):
    plain, ours = train_both(lambda: classifier(optimizer=OPTIMIZERS[name]()))
    assert_same(plain, ours, tolerance=3e-6)
