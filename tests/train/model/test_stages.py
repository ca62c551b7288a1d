"""Layers are divided into stages by bytes, or as they are named."""

import keras
import pytest
from keras import layers

from tests.support.codes import raises
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.model.stages import divide_by_name, divide_evenly, layers_in_order, most_stages


def nested():
    encoder = keras.Sequential([keras.Input((4,)), layers.Dense(8, name="wide"), layers.Dense(4)], name="encoder")
    inputs = keras.Input((4,))
    hidden = layers.Dropout(0.5, name="drop")(encoder(inputs))
    return keras.Model(inputs, layers.Dense(2, name="head")(layers.Add(name="sum")([hidden, inputs])))


def stages(divided):
    return {layer.name: stage for layer, stage in divided}


def test_layers_have_the_names_of_the_models_that_contain_them():
    names = [each.name for each in layers_in_order(nested()) if each.layer.weights]
    assert names[:2] == ["encoder", "encoder/wide"]
    assert names[-1] == "head"


def test_the_largest_stage_is_as_small_as_possible_and_layers_without_weights_follow():
    wide = keras.Sequential([keras.Input((4,)), *(layers.Dense(4, name=f"d{n}") for n in range(6))])
    assert list(stages(divide_evenly(layers_in_order(wide), 3)).values()) == [0, 0, 1, 1, 2, 2]
    found = stages(divide_evenly(layers_in_order(nested()), 2))
    assert (found["wide"], found["drop"], found["sum"], found["head"]) == (0, 1, 1, 1)


def test_patterns_place_layers_at_any_depth():
    place = {"encoder/wide": "worker:1", "encoder/*": "worker:0", "*": "worker:1"}
    found = stages(divide_by_name(layers_in_order(nested()), place))
    assert found["wide"] == found["head"] == 1
    assert next(stage for name, stage in found.items() if name.startswith("dense")) == 0


def test_inner_layers_come_before_those_that_contain_them():
    """A variable is where the first layer is that has it; the last pattern matches the outer layers, too."""
    place = {"encoder/wide": "worker:1", "encoder/*": "worker:0", "*": "worker:1"}
    names = [layer.name for layer, _ in divide_by_name(layers_in_order(nested()), place)]
    assert names.index("wide") < names.index("encoder")


def test_a_pattern_of_a_model_places_all_in_it_and_layers_without_weights_need_none():
    found = stages(divide_by_name(layers_in_order(nested()), {"encoder": "worker:0", "head": "worker:1"}))
    assert (found["wide"], found["drop"], found["head"]) == (0, 0, 1)


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ({"encoder": "worker:0", "heads": "worker:1"}, "unknown-layer"),
        ({"encoder/wide": "worker:0", "head": "worker:1"}, "layer-not-placed"),
    ],
)
def test_patterns_that_do_not_fit_are_refused(place, code):
    with raises(TrainingError, code):
        divide_by_name(layers_in_order(nested()), place)


def test_a_model_with_fewer_layers_than_stages_is_refused():
    layers = layers_in_order(nested())
    assert most_stages(layers) == 3
    assert max(stage for _, stage in divide_evenly(layers, 3)) == 2
    with raises(TrainingError, "model-not-splittable"):
        divide_evenly(layers, 4)
