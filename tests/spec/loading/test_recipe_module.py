"""Finding a recipe's module without importing it."""

import sys

import pytest

from tfdist_cli.spec.loading.problems import SpecError
from tfdist_cli.spec.loading.recipe_module import check_module
from tfdist_cli.spec.sections.recipe import Recipe


@pytest.fixture
def beside(tmp_path):
    (tmp_path / "digits.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "package" / "deep").mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "package" / "deep" / "model.py").write_text("raise RuntimeError('imported')\n")
    return tmp_path


@pytest.mark.parametrize(
    "module",
    [
        "digits",
        "package",
        "package.deep",
        "package.deep.model",
        "json",
        "json.decoder",
        "tfdist_cli.spec.sections.model",
    ],
)
def test_is_there(beside, module):
    before = set(sys.modules)
    check_module(Recipe(module=module, module_dir=beside), "r.yaml")
    assert not {name for name in set(sys.modules) - before if name.startswith(("digits", "package"))}


@pytest.mark.parametrize(
    ("module", "hint"),
    [
        ("digit", "did you mean 'digits'?"),
        ("package.shallow", "put package.shallow.py beside the recipe, or install its package"),
        ("digits.model", "did you mean 'digits'?"),
        ("no_such_module_anywhere.x", "put no_such_module_anywhere.x.py beside the recipe, or install its package"),
        ("__main__.x", "put __main__.x.py beside the recipe, or install its package"),
    ],
)
def test_is_not_there(beside, module, hint):
    with pytest.raises(SpecError) as caught:
        check_module(Recipe(module=module, module_dir=beside), "r.yaml")
    assert str(caught.value) == f"r.yaml: module: there is no module {module!r} in {beside} nor on Python's path"
    assert caught.value.hint == hint


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(SpecError):
        check_module(Recipe(module="digits", module_dir=tmp_path / "gone"), "r.yaml")
