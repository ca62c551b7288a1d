"""`tfdist init`: writes the files of a new project."""

from __future__ import annotations

import difflib
import re
import shlex
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from tfdist_cli.cli.console import console
from tfdist_cli.errors import UsageError
from tfdist_cli.init.convert import convert
from tfdist_cli.init.demo import FIRST, demo_files
from tfdist_cli.init.files import Files, write_files
from tfdist_cli.init.templates import CLUSTER, PROGRAM, Project, program_files, recipe_files, script_files
from tfdist_cli.spec.loading.files import PYTHON, read_text
from tfdist_cli.spec.loading.problems import Place
from tfdist_cli.spec.sections.cluster import MOST_LETTERS, RESERVED_NAMES
from tfdist_cli.spec.strategies import STRATEGIES, Strategy

EXAMPLES = (
    "tfdist init my-project",
    "tfdist init my-project --strategy multi_worker_mirrored --workers 4",
    "tfdist init my-project --program",
    "tfdist init --from train.py",
    "tfdist init --demo",
)
StrategyName = Enum("StrategyName", {name: name for name in get_args(Strategy)}, type=str)  # type: ignore[misc] # from the table
_UNNAMED = "training"


def init(  # noqa: PLR0913 a parameter is an option
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[FOLDER]", help="The folder to write to; by default this one.", show_default=False),
    ] = None,
    *,
    program: Annotated[
        bool | None,
        typer.Option("--program/--recipe", help="Write a program of its own in place of a recipe.", show_default=False),
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option("--from", metavar="SCRIPT", help="Convert a Keras script with model.fit.", show_default=False),
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Write tfdist's demo: cluster files and recipes.")] = False,
    strategy: Annotated[
        StrategyName | None, typer.Option(help="How the tasks train together.", show_default=False)
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Number of workers; 2 by default.")] = None,
    ps: Annotated[int | None, typer.Option(min=1, help="Number of parameter servers; 1 by default.")] = None,
    name: Annotated[
        str | None, typer.Option(help="The cluster's name; by default the folder's.", show_default=False)
    ] = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="With --from: print the changes of the script; write nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
) -> None:
    """Write the files of a new project: a cluster file, and a recipe or a program to start from.

    On a terminal, it asks for what the options leave open. What it writes trains handwritten digits as it is; put your
    model and your data in their place. YAML files name their JSON Schema in the first line, by which editors complete
    and check them.

    --from converts a Keras script: the model is made and compiled under `with tfdist.scope():`, and model.fit becomes
    tfdist.fit. The result is a new file beside the script, SCRIPT_tfdist.py.
    """
    if diff and script is None:
        raise UsageError("--diff needs a script", code="diff-without-script", hint="name it: --from train.py")
    if demo and script:
        raise UsageError("--demo and --from exclude each other", code="demo-and-script", hint="remove one of them")
    target = folder or (script.parent if script else Path())
    if demo:
        _check_demo({"--program": program, "--strategy": strategy, "--workers": workers, "--ps": ps, "--name": name})
        _write(target, demo_files(), f"tfdist launch {_below(target, FIRST)}", force=force)
        return
    if script is None and folder is None and strategy is None and program is None:
        target = _asked_folder(target)
    chosen = _chosen(name or target.absolute().name, strategy, workers, ps)
    if script:
        _convert(script, target, chosen, diff=diff, force=force)
        return
    if program is None:
        program = _asks() and _ask("recipe or program", "recipe", ("recipe", "program")) == "program"
    files = program_files(chosen) if program else recipe_files(chosen)
    command = f" -- python {_below(target, PROGRAM)}" if program else ""
    _write(target, files, f"tfdist launch {_below(target, CLUSTER)}{command}", force=force)


def _check_demo(others: Mapping[str, Any]) -> None:
    """Rejects options of a new project beside --demo.

    Raises:
        UsageError: one is given.
    """
    given = [option for option, value in others.items() if value is not None]
    if given:
        option = "--recipe" if others[given[0]] is False else given[0]
        raise UsageError(
            f"--demo and {option} exclude each other: the demo has files of its own",
            code="option-not-for-demo",
            hint=f"remove {option}, or remove --demo for a project to start from",
        )


def _chosen(name: str, strategy: StrategyName | None, workers: int | None, ps: int | None) -> Project:
    """Returns what the options say, or the answers on a terminal; otherwise the defaults.

    Raises:
        UsageError: an option does not fit the strategy.
    """
    names = get_args(Strategy)
    answer = strategy.value if strategy else _ask("strategy", names[0], names) if _asks() else names[0]
    own: Strategy = next(each for each in names if each == answer)
    traits, several = STRATEGIES[own], not STRATEGIES[own].one_process
    for option, value, fits in (("--workers", workers, several), ("--ps", ps, traits.has_ps)):
        if value is not None and not fits:
            raise UsageError(
                f"{option} does not fit the strategy {own}, which has no such tasks",
                code="option-not-for-strategy",
                hint=f"remove {option}, or choose another --strategy",
            )
    default = Project(name)
    if workers is None and several:
        workers = _ask_count("workers", default.workers) if _asks() else default.workers
    if ps is None and traits.has_ps:
        ps = _ask_count("parameter servers", default.ps) if _asks() else default.ps
    name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:MOST_LETTERS].rstrip("-")
    name = _UNNAMED if not name or name in RESERVED_NAMES else name
    return Project(name, own, workers or default.workers, ps or default.ps)


def _convert(script: Path, target: Path, project: Project, *, diff: bool, force: bool) -> None:
    text = read_text(script, Place(str(script)), PYTHON)
    converted = convert(text, str(script))
    name = f"{script.stem}_tfdist.py"
    for line, note in converted.notes:
        console.write_message(f"note: {script}:{line}: {note}")
    if diff:
        lines = text.splitlines(keepends=True), converted.text.splitlines(keepends=True)
        console.write("".join(difflib.unified_diff(*lines, str(script), str(target / name))).rstrip("\n"))
        return
    files = script_files(project, name, converted.text)
    _write(target, files, f"tfdist launch {_below(target, CLUSTER)} -- python {_below(target, name)}", force=force)


def _write(folder: Path, files: Files, launch: str, *, force: bool) -> None:
    for path in write_files(folder, files, force=force):
        console.write(f"wrote {path}")
    console.write(f"\nNext:\n  {launch.replace('launch', 'check', 1)}\n  {launch}")


def _below(folder: Path, name: str) -> str:
    """Returns the path of a file as a shell takes it."""
    return shlex.quote(str(folder / name))


def _asks() -> bool:
    """Whether questions can be answered."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _asked_folder(default: Path) -> Path:
    return Path(typer.prompt("folder", default=str(default))) if _asks() else default


def _ask(question: str, default: str, choices: tuple[str, ...]) -> str:
    """Asks until the answer is one of the choices."""
    while (answer := str(typer.prompt(f"{question} ({', '.join(choices)})", default=default))) not in choices:
        console.write_message(f"{answer!r} is none of them")
    return answer


def _ask_count(question: str, default: int) -> int:
    while (answer := int(typer.prompt(question, default=default, type=int))) < 1:
        console.write_message("there must be at least 1")
    return answer
