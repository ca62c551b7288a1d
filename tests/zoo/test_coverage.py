"""Every public class of Keras is in a model of the zoo, or excluded with a reason."""

import keras
import pytest

from tests.zoo.case import Case, classifier, vectors
from tests.zoo.coverage import NOT_TRAINED, covered
from tests.zoo.models import CASES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def models():
    """The names of the models that contain an instance of each class."""
    return covered((name, case) for name, case in CASES.items() if not case.example)


@pytest.mark.rotates(5, 1)
def test_every_class_of_keras_is_in_a_model(models):
    missing = sorted(name for name, titles in models.items() if not titles and name not in NOT_TRAINED)
    assert not missing


@pytest.mark.rotates(5, 1)
def test_excluded_classes_exist_and_are_in_no_model(models):
    assert [name for name in NOT_TRAINED if models.get(name) != []] == []


def test_a_new_class_of_keras_is_missing(monkeypatch):
    monkeypatch.setattr(keras.layers, "New", type("New", (keras.layers.Layer,), {}), raising=False)
    found = covered([("dense", Case(dense, vectors))])
    assert found["layers.New"] == []
    assert found["layers.Conv2D"] == []
    assert found["layers.Dense"] == found["losses.SparseCategoricalCrossentropy"] == ["dense"]
    assert found["optimizers.SGD"] == found["initializers.GlorotUniform"] == ["dense"]


def dense():
    inputs = keras.Input((8,))
    return classifier(inputs, keras.layers.Dense(2)(inputs))
