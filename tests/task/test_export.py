"""The export of a checkpoint that a run does not have."""

import pytest

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.spec.sections.recipe import Export, Recipe
from tfdist_cli.task.export import export_checkpoint

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize("saves", [False, True])
def test_a_run_that_ended_before_its_first_checkpoint_is_not_told_to_save_some(tmp_path, saves):
    section = {"checkpoint": {"every_seconds": 60}} if saves else {}
    recipe = Recipe.model_validate({"module": "digits", "train": {"epochs": 1}, **section})
    with raises(UsageError, "checkpoint-not-found") as caught:
        export_checkpoint(recipe, tmp_path, None, Export.model_validate({"format": "keras"}), None)
    assert ("every_seconds" in str(caught.value.hint)) != saves, "it has this already"
