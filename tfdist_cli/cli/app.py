"""The `tfdist` command: the table of commands, and the one place that reports errors."""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import tfdist_cli
from tfdist_cli.cli.console import console
from tfdist_cli.cli.console.standard_output import checked_stdout
from tfdist_cli.errors import TfdistError
from tfdist_cli.spec.path_scheme import refuse_scheme

COMMANDS = {
    "init": "Write the files of a new project: a cluster file, and a recipe or a program to start from.",
    "launch": "Start a cluster and train a recipe, or run your own program in each task.",
    "validate": "Check a cluster and its recipe, and report every problem.",
    "check": "Build a recipe's model and take one step before a cluster starts, and report problems with their fixes.",
    "plan": "Show what `launch` would start: every task with its address, resources and command.",
    "render": "Print the commands, sbatch script, compose file or Kubernetes manifests that `launch` would use.",
    "doctor": "Find problems that would make a job fail, on this machine or on a cluster's hosts, and suggest fixes.",
    "tf-config": "Print the TF_CONFIG of one task.",
    "bench": "Measure a recipe's throughput, how it scales with workers, and the phases of a step.",
    "list": "List the runs in a folder, newest last. The default folder is runs/.",
    "status": "Show a run's tasks, its progress, and why it ended.",
    "logs": "Print the logs of a run's tasks.",
    "report": "Write one HTML file about a run, or about the differences of several runs.",
    "tensorboard": "Open TensorBoard on the event files and profiles of runs.",
    "profile": "Record what a task of a running job does, and show the operations that take its time.",
    "scale": "Change the number of tasks of a role while a run trains.",
    "stop": "Stop a run: the training saves a checkpoint and exits.",
    "role": "Run one task of a cluster in the foreground.",
    "predict": "Predict a file, or a split of the recipe's data, with the model of a run.",
    "export": "Export the model of a checkpoint for programs without tfdist.",
    "schema": "Print the JSON Schema of the cluster file or the recipe file, for editors.",
}
"""Each command and the first line of its help. The module of the same name is imported when the command runs."""


_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"
"""Pydantic's own variable."""


class _Commands(TyperGroup):
    """Lists the commands without importing their modules, so that `tfdist --help` starts fast."""

    def __init__(self, **attributes: Any) -> None:
        placeholders = {name: TyperCommand(name, help=summary) for name, summary in COMMANDS.items()}
        super().__init__(**{**attributes, "commands": placeholders})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, placeholder, rest = super().resolve_command(ctx, args)
        command = placeholder and load_command(str(name))
        gc.freeze()  # the collector skips what was imported, also at exit: an eighth of `tfdist validate`
        gc.enable()
        return name, command, rest


def load_command(name: str) -> Any:
    """Imports the module of a command: it has a function of the same name and `EXAMPLES`, the end of the help text."""
    python_name = name.replace("-", "_")
    with _without_plugins():
        module = import_module(f"tfdist_cli.cli.{python_name}")
    single = typer.Typer(add_completion=False)
    function = getattr(module, python_name)
    examples = "\n\n".join(("Examples:", *module.EXAMPLES))
    single.command(name, help=_unwrapped(function), epilog=examples)(_refusing_url_paths(function))
    return typer.main.get_command(single)


@contextmanager
def _without_plugins() -> Iterator[None]:
    """Within the context, Pydantic looks for no plugins: it would read the metadata of all installed packages.

    A recipe or a program in this process, and tasks that it starts, have the plugins that are installed.
    """
    before = os.environ.get(_PLUGINS)
    os.environ.setdefault(_PLUGINS, "__all__")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PLUGINS]


def _refusing_url_paths(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a command so that it rejects URL paths such as gs://bucket/x in every argument."""

    @wraps(function)
    def checked(*positional: Any, **named: Any) -> Any:
        for name, value in (*enumerate(positional), *named.items()):
            if isinstance(value, Path) and name != "recipe":  # recipes are fetched
                refuse_scheme(value)
        return function(*positional, **named)

    return checked


def _unwrapped(function: Any) -> str:
    """Returns the docstring with one line per paragraph, which the terminal wraps."""
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in (inspect.getdoc(function) or "").split("\n\n"))


app = typer.Typer(cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(value: bool) -> None:
    if value:
        console.write(f"tfdist {tfdist_cli.__version__}")
        raise typer.Exit


@app.callback(epilog="Start with: tfdist init my-project")
def tfdist(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """One YAML file, a TensorFlow cluster, a trained Keras 3 model."""


def main() -> None:
    """Runs `tfdist`. A TfdistError is printed without its traceback; any other exception is a bug and keeps it."""
    console.open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, TextIOWrapper
        ):  # file names may be invalid UTF-8, and some terminals cannot print all of Unicode
            stream.reconfigure(errors="backslashreplace")
    gc.disable()  # imports leave no garbage
    try:
        with checked_stdout():
            app(prog_name="tfdist")
    except TfdistError as error:
        with console.tolerating_closed_output():
            console.print_error(error)
        sys.exit(error.exit_code)
    finally:
        gc.enable()
