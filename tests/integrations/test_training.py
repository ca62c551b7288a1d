"""The files of a training on a table, and what is refused before it starts."""

import pytest

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.integrations.model_function import ModelFunction
from tfdist_cli.integrations.table import TableColumns
from tfdist_cli.integrations.training import TableTraining, training_folder
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe

COLUMNS = TableColumns(["a", "b"], "y")
FUNCTION = ModelFunction("models:build", "/code", {"units": 3})


def training(**arguments):
    return TableTraining(FUNCTION, COLUMNS, "spark", {"session": "/s"}, **arguments)


@pytest.mark.parametrize(
    ("arguments", "roles"), [({"workers": 3}, {"worker": 3}), ({"ps": 2}, {"chief": 1, "worker": 2, "ps": 2})]
)
def test_the_cluster_has_a_slot_for_each_task(arguments, roles, tmp_path):
    given = training(cpus=2, **arguments)
    cluster = Cluster.model_validate({**given.cluster("name"), "recipe": None})
    counts = {role: cluster.roles.count(role) for role in roles}
    assert counts == roles
    assert len(cluster.tasks) == given.tasks == sum(roles.values())
    assert {cluster.role(task).cpus for task in cluster.tasks} == {2}


@pytest.mark.parametrize(("folder", "remote"), [(Url("s3://bucket/x"), True), (None, False)])
def test_the_recipe_writes_to_a_store(folder, remote, tmp_path):
    recipe = Recipe.model_validate(
        training(epochs=3, batch_size=8).recipe({"train": "/d/*.parquet"}, folder or tmp_path)
    )
    assert (recipe.train.epochs, recipe.train.batch_size, recipe.evaluate) == (3, 8, None)
    assert recipe.params["model"] == "models:build"
    assert bool(recipe.checkpoint.dir) == bool(recipe.export.upload) == remote


def test_copies_of_rows_are_removed_and_the_run_stays(tmp_path):
    with training_folder(tmp_path, "a b/c") as folder:
        (folder / "data" / "train").mkdir(parents=True)
        (folder / "run").mkdir()
    assert folder.name.startswith("a-b-c-")
    assert [path.name for path in folder.iterdir()] == ["run"]


def test_nothing_is_left_of_what_did_not_start(tmp_path):
    with training_folder(tmp_path, "a") as folder:
        (folder / "data").mkdir()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [{"workers": 0}, {"ps": -1}, {"epochs": 0}, {"batch_size": 1.5}])
def test_numbers_that_are_refused(arguments):
    with raises(UsageError, "out-of-range"):
        training(**arguments)


@pytest.mark.parametrize("features", ["a", [], {}, {"x": []}, [1]])
def test_features_are_names(features):
    with raises(UsageError, "invalid-features"):
        TableColumns(features, "y")


def test_missing_columns():
    with raises(UsageError, "no-such-column"):
        COLUMNS.check_in(["a", "y"], "the table")
    assert TableColumns({"u": ["a"], "v": ["a", "b"]}, "y").names == ["a", "b", "y"]
