"""The `tfdist` command: which commands there are, and the one place where errors end."""

from __future__ import annotations

import inspect
import signal
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import tfdist_cli
from tfdist_cli.cli.console import console
from tfdist_cli.errors import ExitCode, TfdistError
from tfdist_cli.spec.path_scheme import refuse_scheme

COMMANDS = {
    "launch": "Start a cluster and train a recipe, or run your own program in each task.",
    "validate": "Check a cluster and its recipe, and say everything that is wrong with them.",
    "plan": "Show what `launch` would start: every task with its address, resources and command.",
    "render": "Print exactly what `launch` would do, in the words of the program that does it.",
    "doctor": "Look for what would make a job fail, here or on the hosts of a cluster, and say how to mend it.",
    "tf-config": "Print the TF_CONFIG of one task.",
    "bench": "Measure how fast a recipe trains, how that grows with workers, and where the time of a step goes.",
    "list": "List the runs in a folder, the newest last: runs/ of the current folder by default.",
    "status": "Show how a run stands: its tasks, its progress, and what ended it.",
    "logs": "Print what a run's tasks have written, those of runs/latest by default.",
    "scale": "Change how many workers, ps or other tasks a run has, while it runs.",
    "stop": "End a run: its launcher lets the training save a checkpoint and ends.",
    "role": "Run one task of a cluster in the foreground.",
    "export": "Write the model of a checkpoint for programs that have no tfdist.",
    "schema": "Print the JSON Schema of a cluster or a recipe file, for editors.",
}
"""Each command and the first line of its help; its module, of the same name, is imported when it runs."""


class _Commands(TyperGroup):
    """Lists the commands without importing them, which keeps `tfdist --help` and every command quick."""

    def __init__(self, **attributes: Any) -> None:
        stand_ins = {name: TyperCommand(name, help=summary) for name, summary in COMMANDS.items()}
        super().__init__(**{**attributes, "commands": stand_ins})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, stand_in, rest = super().resolve_command(ctx, args)
        return name, stand_in and load_command(str(name)), rest


def load_command(name: str) -> Any:
    """Imports a command: a function, and the examples that end its help, in the module of its name."""
    python_name = name.replace("-", "_")
    module = import_module(f"tfdist_cli.cli.{python_name}")
    single = typer.Typer(add_completion=False)
    function = getattr(module, python_name)
    examples = "\n\n".join(("Examples:", *module.EXAMPLES))
    single.command(name, help=_unwrapped(function), epilog=examples)(_with_paths_of_this_machine(function))
    return typer.main.get_command(single)


def _with_paths_of_this_machine(function: Callable[..., Any]) -> Callable[..., Any]:
    """The command, which refuses a path such as gs://bucket/x wherever it is given one."""

    @wraps(function)
    def checked(*positional: Any, **named: Any) -> Any:
        for value in (*positional, *named.values()):
            if isinstance(value, Path):
                refuse_scheme(value)
        return function(*positional, **named)

    return checked


def _unwrapped(function: Any) -> str:
    """The help as the terminal is to wrap it: a line for each paragraph of the docstring."""
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in (inspect.getdoc(function) or "").split("\n\n"))


app = typer.Typer(cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(value: bool) -> None:
    if value:
        console.write(f"tfdist {tfdist_cli.__version__}")
        raise typer.Exit


@app.callback(epilog="Start with: tfdist launch configs/local.yaml")
def tfdist(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """One YAML file, a TensorFlow cluster, a trained Keras 3 model."""


def _interrupted(_number: int, _frame: FrameType | None) -> None:
    """Ctrl-C before, or without, a command's own way of taking it."""
    sys.exit(ExitCode.INTERRUPTED)


def main() -> None:
    """Runs `tfdist`; an error that a user can act on is told in a line, any other is a bug and keeps its traceback."""
    signal.signal(signal.SIGINT, _interrupted)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a folder's name need not be text, nor a terminal take all of Unicode
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="tfdist")
    except TfdistError as error:
        console.print_error(error)
        sys.exit(error.exit_code)
