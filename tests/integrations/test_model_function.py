"""Which model functions another process can import."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.support import table_models
from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.integrations.model_function import ModelFunction

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("given", "name", "folder"),
    [
        (table_models.four_classes, "tests.support.table_models:four_classes", str(ROOT)),
        (table_models.Models.four, "tests.support.table_models:Models.four", str(ROOT)),
        ("tests.support.table_models:four_classes", "tests.support.table_models:four_classes", str(ROOT)),
        ("tfdist_cli.launch:launch", "tfdist_cli.launch:launch", str(ROOT)),  # a module that is a package
        ("not_here:build", "not_here:build", None),
        ("not_here.models:build", "not_here.models:build", None),
    ],
)
def test_its_name_and_folder(given, name, folder):
    function = ModelFunction.of(given, {"units": [1, None]})
    assert function.as_params() == {"model": name, "folder": folder, "arguments": {"units": [1, None]}}


def inner():
    def build():
        pass

    return build


def test_a_second_name_of_a_function():
    assert ModelFunction.of(table_models.Models.build).name == "tests.support.table_models:not_compiled"


@pytest.mark.parametrize("given", [lambda: 1, inner(), partial(inner), "models", "a:b c", "a:", 3, None])
def test_functions_that_are_refused(given):
    with raises(UsageError, "model-function-not-importable"):
        ModelFunction.of(given)


def test_functions_that_were_replaced_are_refused(monkeypatch):
    given = table_models.four_classes
    monkeypatch.setattr(table_models, "four_classes", lambda: given)
    with raises(UsageError, "model-function-not-importable"):
        ModelFunction.of(given)


def test_a_function_of_the_program_is_refused(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(
        "from tfdist_cli.integrations.model_function import ModelFunction\n"
        "def build(): pass\n"
        "try:\n    ModelFunction.of(build)\nexcept Exception as error:\n    print(error.code, error.hint)\n"
    )
    run = subprocess.run(
        [sys.executable, program], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert run.stdout.startswith("model-function-not-importable ")
    assert "import build" in run.stdout


@pytest.mark.parametrize("arguments", [{"x": object()}, {"x": (1, 2)}, {"x": {1: 2}}, {"x": {2}}])
def test_arguments_are_plain(arguments):
    with raises(UsageError, "invalid-model-args"):
        ModelFunction.of("a:b", arguments)
