"""Every public class of Keras's is in a model of the zoo, or is excused with a reason."""

import keras
import pytest

from tests.zoo.case import Case, classifier, vectors
from tests.zoo.coverage import NOT_TRAINED, covered
from tests.zoo.models import CASES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models():
    """The names of the models that have an object of a class, by class."""
    return covered(CASES.items())


def test_every_class_of_keras_is_in_a_model(models):
    missing = sorted(name for name, titles in models.items() if not titles and name not in NOT_TRAINED)
    assert not missing, f"no model of tests/zoo has {', '.join(missing)}"


def test_what_is_excused_exists_and_is_in_no_model(models):
    assert [name for name in NOT_TRAINED if models.get(name) != []] == []


def test_a_class_that_keras_gets_is_missing(monkeypatch):
    monkeypatch.setattr(keras.layers, "New", type("New", (keras.layers.Layer,), {}), raising=False)
    found = covered([("dense", Case(dense, vectors))])
    assert found["layers.New"] == []
    assert found["layers.Conv2D"] == []
    assert found["layers.Dense"] == found["losses.SparseCategoricalCrossentropy"] == ["dense"]
    assert found["optimizers.SGD"] == found["initializers.GlorotUniform"] == ["dense"]


def dense():
    inputs = keras.Input((8,))
    return classifier(inputs, keras.layers.Dense(2)(inputs))
