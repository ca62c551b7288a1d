"""The sections of a recipe."""

import pytest
from pydantic import ValidationError

from tfdist_cli.spec.sections.recipe import Evaluate, Export, Recipe, services_of


def test_the_services_that_a_recipe_uses():
    params = {"data": ["s3://bucket/a", {"test": "gs://bucket/b"}], "text": "x: y", "page": "http://host/x", "n": 3}
    recipe = Recipe.model_validate({"module": "m", "params": params, "export": {"upload": "s3://bucket/model"}})
    assert services_of(recipe) == ("s3://bucket/model", "s3://bucket/a", "gs://bucket/b")


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"place": {"a": "worker:1"}}, "place-skips-task"),
        ({"place": {"a": "worker:0"}, "stages": 1}, "stages-and-place"),
        ({"place": {"a": "worker:0"}, "balance": "time"}, "balance-and-place"),
        ({"micro_batches": 33}, "micro-batches-do-not-fit"),
    ],
)
def test_stages_that_cannot_be(keys, code):
    with pytest.raises(ValidationError) as raised:
        Recipe.model_validate({"module": "m", **keys})
    (error,) = raised.value.errors()
    assert [problem.code for problem in error["ctx"]["error"].problems] == [code]


def test_the_number_of_stages():
    assert Recipe.model_validate({"module": "m"}).stage_count(4) == 4
    assert Recipe.model_validate({"module": "m", "stages": 2}).stage_count(4) == 2
    place = {"a": "worker:1", "b": "worker:0", "*": "worker:1"}
    assert Recipe.model_validate({"module": "m", "place": place}).stage_count(4) == 2


@pytest.mark.parametrize("export", [{"signatures": "no function"}, {"format": "keras", "signatures": "signatures"}])
def test_signatures_that_cannot_be(export):
    with pytest.raises(ValidationError):
        Export.model_validate(export)


@pytest.mark.parametrize(
    ("evaluate", "maximizes"),
    [
        ({}, False),
        ({"monitor": "val_accuracy"}, True),
        ({"monitor": "val_mean_absolute_error"}, False),
        ({"monitor": "val_clicks", "mode": "max"}, True),
        ({"monitor": "val_accuracy", "mode": "min"}, False),
        ({"monitor": "val_false_positives"}, False),
        ({"monitor": "val_false_negatives_1"}, False),
        ({"monitor": "val_true_positives"}, True),
    ],
)
def test_whether_a_higher_value_is_better(evaluate, maximizes):
    assert Evaluate.model_validate(evaluate).maximizes == maximizes


def test_a_monitor_whose_direction_is_not_known():
    with pytest.raises(ValidationError) as caught:
        Evaluate.model_validate({"monitor": "val_clicks"})
    [details] = caught.value.errors()
    assert [problem.code for problem in details["ctx"]["error"].problems] == ["monitor-without-mode"]
