"""Tests of failure reports: each failure is reported once."""

import importlib.util
import json
import sys

import pytest

from tfdist_cli.errors import TimeoutExceeded, TrainingError, UsageError
from tfdist_cli.task import failure
from tfdist_cli.task.failure import report
from tfdist_cli.task.module import RecipeModule


@pytest.fixture
def users_module(tmp_path):
    """Returns a function that imports a user's file below a folder."""

    def load(text, folder=tmp_path):
        path = folder / "users_recipe.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("users_recipe", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def raised_by(call):
    """Returns the error of a call that no file makes."""
    scope = {"call": call}
    exec(compile("try:\n    call()\nexcept Exception as error:\n    raised = error", "<nobody>", "exec"), scope)
    return scope["raised"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TrainingError("failure", code="some-code", hint="a hint"), 1),
        (UsageError("failure", code="some-code", hint="a hint"), 2),
        (TimeoutExceeded("failure", code="some-code", hint="a hint"), 124),
    ],
)
def test_an_error_of_tfdist_is_a_message_and_a_hint(error, code, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("TFDIST_TASK_DIR", str(tmp_path))
    assert report(error) == code
    assert capsys.readouterr().err == "error[some-code]: failure\nhint: a hint\n"
    written = json.loads((tmp_path / "error.json").read_text())
    assert written == {
        "type": type(error).__name__,
        "message": "failure",
        "code": "some-code",
        "hint": "a hint",
        "traceback": "",
        "exit_code": code,
    }


def test_the_users_error_is_a_traceback_from_the_users_line_on(users_module, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("TFDIST_TASK_DIR", str(tmp_path))
    module = users_module(
        "def model(params):\n    return sum(numbers(params))\ndef numbers(params):\n    return [1 / 0]\n"
    )
    assert report(raised_by(RecipeModule(module, {}).model)) == 1
    err = capsys.readouterr().err
    assert err.count("ZeroDivisionError:") == 1
    assert err.count("Traceback") == 1
    assert "sum(numbers(params))" in err
    assert "return [1 / 0]" in err
    assert "module.py" not in err
    assert "test_failure.py" not in err
    written = json.loads((tmp_path / "error.json").read_text())
    assert (written["type"], written["message"], written["traceback"]) == ("ZeroDivisionError", "division by zero", err)


def test_frames_of_libraries_below_the_users_are_shown(users_module, capsys):
    module = users_module("import json\ndef model(params):\n    return json.loads('{')\n")
    report(raised_by(RecipeModule(module, {}).model))
    err = capsys.readouterr().err
    assert "return json.loads('{')" in err
    assert "json/decoder.py" in err


def test_causes_are_shown(users_module, capsys):
    module = users_module(
        "def model(params):\n    try:\n        {}['x']\n    except KeyError as error:\n"
        "        raise ValueError('no x') from error\n"
    )
    report(raised_by(RecipeModule(module, {}).model))
    err = capsys.readouterr().err
    assert "KeyError: 'x'" in err
    assert "direct cause" in err
    assert "ValueError: no x" in err
    assert "module.py" not in err


def test_a_users_program_below_pythons_folder_is_the_users(users_module, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    module = users_module("def model(params):\n    raise KeyError('x')\n", tmp_path / "src" / "app")
    report(raised_by(RecipeModule(module, {}).model))
    err = capsys.readouterr().err
    assert "raise KeyError('x')" in err
    assert "module.py" not in err


def test_a_bug_of_tfdist_has_all_frames(capsys):
    report(raised_by(RecipeModule(None, {}).model))
    assert "module.py" in capsys.readouterr().err


def test_an_error_file_that_cannot_be_written_is_ignored(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("TFDIST_TASK_DIR", str(tmp_path / "gone"))
    assert report(TrainingError("it failed")) == 1
    assert "it failed" in capsys.readouterr().err


def test_a_launcher_is_sent_a_record(monkeypatch, capsys):
    sent = []
    monkeypatch.setattr(failure, "emit", lambda kind, **fields: sent.append((kind, fields)))
    report(ValueError("x" * 9))
    ((kind, fields),) = sent
    assert (kind, fields["type"], fields["message"], fields["hint"]) == ("error", "ValueError", "x" * 9, None)


def test_reports_have_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDIST_TASK_DIR", str(tmp_path))
    monkeypatch.setenv("TFDIST_SECRETS", "KEY")
    monkeypatch.setenv("KEY", 'the "key"')
    report(TrainingError('message the "key"', hint='hint the "key"'))
    written = json.loads((tmp_path / "error.json").read_text())
    assert (written["message"], written["hint"]) == ("message ***", "hint ***")
