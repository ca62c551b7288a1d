"""Every file in configs/ and recipes/ has a name of the scheme, describes itself in its first line, and loads."""

import re
from pathlib import Path

import pytest

from tfdist_cli.spec.loading.load import load_run

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
each_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
each_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


@pytest.mark.parametrize("path", CONFIGS + RECIPES, ids=lambda path: path.stem)
def test_the_first_line_describes_the_file(path):
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith(".")


@each_config
def test_a_cluster_loads_with_its_recipe(path):
    cluster, recipe = load_run(path)
    assert recipe is not None
    assert cluster.recipe in RECIPES


@each_config
def test_a_clusters_name_begins_with_what_starts_its_tasks(path):
    cluster, _ = load_run(path)
    fixed = cluster.launcher == "local" and all(spec.hosts for _, spec in cluster.roles if spec)
    starter, _, what = path.stem.partition("_")
    assert starter == ("role" if fixed else cluster.launcher)
    assert cluster.strategy in ("parameter_server", what)


def test_the_lists_of_files_are_complete():
    for pages, files in (("configs/README.md", CONFIGS), ("docs/reference/recipe.md", RECIPES)):
        listed = re.findall(r"^\| \[?`?([a-z_]+\.yaml)", (ROOT / pages).read_text(encoding="utf-8"), re.MULTILINE)
        assert sorted(listed) == [path.name for path in files]


@each_recipe
def test_each_recipe_loads_on_a_cluster_of_this_machine(path):
    cluster = "local_data_service.yaml" if path.stem == "digits_augmented" else "local.yaml"
    _, recipe = load_run(ROOT / "configs" / cluster, path)
    assert recipe is not None
    assert recipe.train.epochs or recipe.train.max_steps


def test_the_asynchronous_recipe_takes_the_steps_that_are_documented():
    _, recipe = load_run(ROOT / "configs" / "local_mnist.yaml", ROOT / "recipes" / "mnist_softmax_async.yaml")
    assert recipe is not None
    assert (recipe.train.share, recipe.updates.worker_steps) == ("copy", "equal")
    steps = 55_000 // recipe.train.batch_size * (recipe.train.epochs or 0)
    assert (steps, 3 * steps, recipe.params["learning_rate"]) == (27_500, 82_500, 0.01)
