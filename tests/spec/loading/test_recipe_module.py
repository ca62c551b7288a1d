"""Finding a recipe's module without importing it."""

import sys

import pytest

from tests.support.codes import raises
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
    ("module", "suggested"),
    [
        ("digit", "'digits'"),
        ("package.shallow", "package.shallow.py"),
        ("digits.model", "'digits'"),
        ("no_such_module_anywhere.x", "no_such_module_anywhere.x.py"),
        ("__main__.x", "__main__.x.py"),
    ],
)
def test_is_not_there(beside, module, suggested):
    with pytest.raises(SpecError) as caught:
        check_module(Recipe(module=module, module_dir=beside), "r.yaml")
    [problem] = caught.value.problems
    assert (problem.place.file, problem.key, problem.code) == ("r.yaml", "module", "no-such-module")
    assert repr(module) in problem.message
    assert str(beside) in problem.message
    assert suggested in str(caught.value.hint)


def test_a_folder_that_is_not_there(tmp_path):
    with raises(SpecError, "no-such-module"):
        check_module(Recipe(module="digits", module_dir=tmp_path / "gone"), "r.yaml")
