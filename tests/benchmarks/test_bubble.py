"""The idle time of stages."""

import pytest
import yaml

from benchmarks.bubble import WAIT, Case, Result, table
from tfdist_cli.spec.sections.recipe import Recipe


def test_a_case_and_its_ideal_pipeline():
    assert Case.parse("2:8") == Case(2, 8)
    assert Case(1, 4).ideal == 0
    assert Case(2, 8).ideal == pytest.approx(1 / 9)
    with pytest.raises(ValueError, match="unpack"):
        Case.parse("2")


def test_its_recipe_places_each_stage_on_a_worker():
    recipe = Recipe.model_validate(yaml.safe_load(Case(2, 4).recipe()))
    assert recipe.place == {"stage_0": "worker:0", "stage_1": "worker:1"}
    assert recipe.micro_batches == 4


def test_the_table_has_the_part_of_a_step_in_which_a_stage_does_not_work():
    row = table({Case(2, 1): [Result(6 * WAIT, 0.25), Result(6 * WAIT, 0.5)]}).splitlines()[-1]
    assert row == "| 2 | 1 | 480 | 0.500 (0.500 to 0.500) | 0.500 | 50% |"
