"""The command as a whole: help, errors and exit codes."""

import inspect
import subprocess
import sys
from importlib import import_module

import pytest

from tests.support.codes import codes_in
from tfdist_cli.cli import app as application
from tfdist_cli.cli.app import COMMANDS, load_command
from tfdist_cli.errors import TfdistError, TimeoutExceeded


def test_help_lists_the_commands(tfdist):
    result = tfdist("--help")
    assert result.code == 0
    for command in COMMANDS:
        assert f" {command} " in result.out


def test_help_does_not_import_what_only_commands_use():
    code = "import sys, tfdist_cli.cli.app; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"pydantic", "yaml", "psutil", "asyncio", "rich.console", "tfdist_cli.plan"} & set(done.stdout.split())


PLUGIN = """
print("loaded")

class Plugin:
    def new_schema_validator(self, *_, **__):
        return None, None, None

plugin = Plugin()
"""
DEFINES_A_MODEL = """
import os, pydantic
from tfdist_cli.cli.app import load_command

load_command("validate")
print(os.environ.get("PYDANTIC_DISABLE_PLUGINS"))
pydantic.create_model("Own", number=(int, 1))
"""


@pytest.mark.parametrize(("disabled", "printed"), [(None, ["None", "loaded"]), ("1", ["1"])])
def test_pydantic_looks_for_plugins_for_the_models_of_a_program_alone(tmp_path, monkeypatch, disabled, printed):
    installed = tmp_path / "plugin-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[pydantic]\nown = plugin_of_pydantic:plugin\n")
    (tmp_path / "plugin_of_pydantic.py").write_text(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("PYDANTIC_DISABLE_PLUGINS", raising=False)
    if disabled:
        monkeypatch.setenv("PYDANTIC_DISABLE_PLUGINS", disabled)
    done = subprocess.run([sys.executable, "-c", DEFINES_A_MODEL], capture_output=True, text=True, check=True)
    assert done.stdout.split() == printed


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_teaches(tfdist, command):
    result = tfdist(command, "--help")
    assert result.code == 0
    assert f"Usage: tfdist {command}" in result.out
    assert f"tfdist {command} " in result.out.partition("Examples:")[2]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_list_of_commands_says_what_they_say(command):
    python_name = command.replace("-", "_")
    function = getattr(import_module(f"tfdist_cli.cli.{python_name}"), python_name)
    assert (inspect.getdoc(function) or "").split("\n")[0] == COMMANDS[command]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained(command):
    loaded = load_command(command)
    context = loaded.make_context(command, [], resilient_parsing=True)
    for parameter in loaded.params:
        _, text = parameter.get_help_record(context)
        assert text.removesuffix("[required]").strip(), parameter.name


def test_version(tfdist):
    assert tfdist("--version").out.startswith("tfdist ")


def test_no_command_is_bad_usage(tfdist):
    result = tfdist()
    assert result.code == 2
    assert "Usage: tfdist" in result.out + result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["valdate"], "Did you mean 'validate'?"),
        (["validate"], "Missing argument 'CLUSTER'"),
        (["validate", "c.yaml", "--recip", "x"], "No such option"),
        (["schema", "other"], "'other' is not one of"),
    ],
)
def test_bad_usage(tfdist, arguments, message):
    result = tfdist(*arguments)
    assert result.code == 2
    assert message in " ".join(result.err.split())
    assert not result.out


def test_an_error_has_a_line_for_each_problem_a_hint_and_its_exit_code(tfdist, monkeypatch):
    def fail(**_):
        raise TimeoutExceeded("[worker:1] is\nnot [bold]up[/]", hint="see [/tmp/log]")

    monkeypatch.setattr(application, "app", fail)
    result = tfdist()
    assert result.code == 124
    assert result.err == "error: [worker:1] is\nerror: not [bold]up[/]\nhint: see [/tmp/log]\n"
    assert not result.out


def test_an_error_without_a_hint(tfdist, monkeypatch):
    def fail(**_):
        raise TfdistError("no")

    monkeypatch.setattr(application, "app", fail)
    result = tfdist()
    assert (result.code, result.err) == (1, "error: no\n")


def test_a_bug_keeps_its_traceback(monkeypatch):
    def fail(**_):
        raise ZeroDivisionError

    monkeypatch.setattr(application, "app", fail)
    with pytest.raises(ZeroDivisionError):
        application.main()


def test_a_reader_that_goes_away_is_no_error(cluster_file):
    script = f"{sys.executable} -m tfdist_cli schema recipe | head -c 10"
    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert len(run.stdout) == 10
    assert not run.stderr


@pytest.mark.parametrize(
    "command", ["schema recipe", "list . --json", "plan cluster.yaml -- true", "--version", "--help"]
)
def test_output_that_cannot_be_written_is_an_error(cluster_file, command):
    script = f"{sys.executable} -m tfdist_cli {command} >/dev/full"
    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (run.returncode, codes_in(run.stderr)) == (2, ["output-not-writable"])
    assert "Traceback" not in run.stderr
    assert "Exception ignored" not in run.stderr


def test_an_error_has_its_exit_code_where_nothing_can_be_written(cluster_file):
    script = f"{sys.executable} -m tfdist_cli schema recipe >/dev/full 2>&1"
    assert subprocess.run(["bash", "-c", script], check=False).returncode == 2


def test_a_program_may_print_to_an_unbuffered_output(cluster_file):
    argv = [sys.executable, "-u", "-m", "tfdist_cli", "--version"]
    run = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("tfdist ")


def test_an_error_of_another_file_keeps_its_traceback(monkeypatch):
    def fail(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(application, "app", fail)
    with pytest.raises(OSError, match="No space"):
        application.main()


def test_no_colour_where_there_is_no_terminal(tfdist):
    assert "\x1b" not in tfdist("validate", "nowhere.yaml").err


INTERRUPTED_IMPORT = """
import signal, sys

class Interrupts:
    def find_spec(self, name, *_):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from tfdist_cli.__main__ import main
main()
"""


def test_an_interrupt_during_the_imports_has_no_traceback():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
