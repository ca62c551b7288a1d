"""Tests of a recipe's module: it is found beside the recipe, and its faults are reported."""

import sys

import pytest

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.task.module import RecipeModule
from tfdist_cli.train.data.shard import ALL

WHOLE = (
    "def model(params):\n    return params.pop('units')\ndef dataset(params, split, shard):\n    return split, shard\n"
)


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Returns a function that loads a recipe whose module has a given source text."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write_and_load(text, name="users_module", file=None):
        monkeypatch.delitem(sys.modules, name, raising=False)  # another test's
        if text is not None:
            (tmp_path / (file or f"{name}.py")).write_text(text)
        return RecipeModule.load(
            Recipe.model_validate({"module": name, "module_dir": tmp_path, "params": {"units": 3}})
        )

    yield write_and_load
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_what_a_module_defines(load):
    module = load(WHOLE + "def callbacks(params):\n    return (params['units'],)\n")
    assert module.model() == 3
    assert module.model() == 3  # each call gets its own copy of the params
    assert module.dataset("test", ALL) == ("test", ALL)
    assert module.callbacks() == (3,)


def test_callbacks_are_optional(load):
    assert load(WHOLE).callbacks() is None


def test_a_missing_module(load, tmp_path):
    with raises(UsageError, "no-such-module") as caught:
        load(None)
    assert "'users_module'" in caught.value.message
    assert str(tmp_path) in caught.value.message


def test_a_missing_package(load):
    with raises(UsageError, "no-such-module") as caught:
        load(None, name="no_such_package.recipe")
    assert "'no_such_package.recipe'" in caught.value.message


def test_a_missing_import_of_the_module(load):
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        load("import no_such_library\n")


@pytest.mark.parametrize(("text", "missing"), [("model = 3\n", "model"), ("def model(params): pass\n", "dataset")])
def test_a_missing_function(text, missing, load, tmp_path):
    with raises(UsageError, "recipe-function-missing") as caught:
        load(text)
    assert f"{tmp_path}/users_module.py" in caught.value.message
    assert repr(missing) in caught.value.message


def test_a_syntax_error(load):
    with pytest.raises(SyntaxError):
        load("def model(params:\n")


def test_the_folder_of_the_recipe_is_searched_first(load):
    assert load(WHOLE, name="digits_mlp").model() == 3
