"""Every file in configs/ and recipes/ says in its first line what it is, and loads."""

from pathlib import Path

import pytest

from tfdist_cli.spec.loading.load import load_run

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS + RECIPES, ids=lambda path: path.stem)
def test_the_first_line_says_what_it_is(path):
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith(".")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_cluster_loads_with_its_recipe(path):
    cluster, recipe = load_run(path)
    assert recipe is not None
    assert cluster.recipe in RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_each_recipe_loads_on_a_cluster_of_this_machine(path):
    cluster = "with_data_service.yaml" if path.stem == "digits_served" else "local.yaml"
    _, recipe = load_run(ROOT / "configs" / cluster, path)
    assert recipe is not None
    assert recipe.train.epochs or recipe.train.max_steps


def test_the_tutorials_figures():
    _, recipe = load_run(ROOT / "configs" / "one_ps_three_workers.yaml")
    assert recipe is not None
    steps = 55_000 // recipe.train.batch_size * (recipe.train.epochs or 0)
    assert (steps, 3 * steps) == (27_500, 82_500)
