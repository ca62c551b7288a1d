"""`tfdist scale`: other numbers of tasks for a run that goes on."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from tfdist_cli.cli.console import console
from tfdist_cli.cli.console.progress import duration
from tfdist_cli.cli.options import LATEST
from tfdist_cli.errors import TfdistError, TimeoutExceeded, UsageError
from tfdist_cli.launch.run.directory import EVENTS_FILE
from tfdist_cli.launch.run.history import RunView, launcher_of, read_run
from tfdist_cli.launch.run.report import format_replicas
from tfdist_cli.launch.run.requests import SIGNAL, Request, post_request
from tfdist_cli.protocol.run_files import open_file, parse_lines
from tfdist_cli.spec.path_scheme import refuse_scheme
from tfdist_cli.spec.roles import ROLES, Role

EXAMPLES = (
    "tfdist scale worker=4",
    "tfdist scale runs/digits-20260102-030405 worker=3 ps=2",
    "tfdist scale worker=4 --dry-run",
)
_PERIOD = 0.1
"""Seconds between two looks at what another process writes."""
_HOW = "write ROLE=N, such as worker=4"
_NUMBER = re.compile(r"[a-z_]+=.*", re.DOTALL)


def scale(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] ROLE=N...",
            help="The run's directory, runs/latest by default, and for each role that changes how many tasks it is "
            "to have.",
            show_default=False,
        ),
    ],
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say whether the run could be changed so.")] = False,
    wait: Annotated[bool, typer.Option(help="Wait until the training goes on with the new numbers.")] = True,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait.")] = 300.0,
) -> None:
    """Change how many workers, ps or other tasks a run has, while it runs.

    The training saves a checkpoint, all tasks end, and the new ones go on from it, at the next step: ports and cores
    are shared out anew, variables spread over the ps that there are, and the data is divided among the workers that
    there are. The launcher goes on; no restart is counted. What the cluster file would not allow is refused, with the
    same words, and so is a run of a program of your own or without checkpoints.

    A run that has ended goes on with other numbers by
    tfdist launch CLUSTER --run-dir RUN --set roles.worker.replicas=4

    Exit codes: 0 the training goes on with these numbers, or would, or has them already; 1 the run has ended instead;
    2 it was refused; 124 it takes longer than --timeout.
    """
    run, replicas = _read(arguments)
    news = read_run(run)
    if news.launcher is None:
        raise UsageError(
            f"{news.path.name} does not run: it is {news.outcome.value}",
            hint=f"tfdist launch CLUSTER --run-dir {run} {_settings(replicas)} goes on from its last checkpoint",
        )
    asked = _Asked(news, time.monotonic() + timeout)
    with post_request(news.path, replicas, dry_run=dry_run) as request:
        asked.number = request.number
        answer = asked.hear("scale")
    if _settled(answer, request):
        return
    what = format_replicas(answer["replicas"])
    console.write(f"{what}: the training saves a checkpoint, and goes on with these numbers")
    if wait:
        scaled = asked.hear("scaled")
        where = "from the beginning" if scaled["resumed"] is None else f"from step {scaled['resumed']}"
        console.write(f"{what}: it went on {where}, {duration(scaled['took'])} later")


def _read(arguments: list[str]) -> tuple[Path, dict[Role, int]]:
    """The run, and the numbers."""
    given = [] if _NUMBER.fullmatch(arguments[0]) else [arguments[0]]
    replicas: dict[Role, int] = {}
    for text in arguments[len(given) :]:
        name, _, number = text.partition("=")
        role = next((role for role in ROLES if role == name), None)
        if role is None:
            near = get_close_matches(name, ROLES, n=1)
            meant = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(ROLES)}"
            raise UsageError(f"{text}: there is no role {name!r}, {meant}", hint=_HOW)
        if not (number.isascii() and number.isdigit() and len(number) < 10):
            raise UsageError(f"{text}: expected a number of tasks, got {number!r}", hint=_HOW)
        if role in replicas:
            raise UsageError(f"{text}: {role} has a number already", hint=f"write {role}=N once")
        replicas[role] = int(number)
    if not replicas:
        raise UsageError("which numbers of tasks is the run to have?", hint=_HOW)
    if given:
        refuse_scheme(given[0])
    return Path(given[0]) if given else LATEST, replicas


def _settings(replicas: Mapping[Role, int]) -> str:
    return " ".join(f"--set roles.{role}.replicas={number}" for role, number in replicas.items())


def _settled(answer: Mapping[str, Any], request: Request) -> bool:
    """Whether the launcher's answer is all that there is to say.

    Raises:
        UsageError: it has refused.
    """
    match answer["answer"]:
        case "refused":
            raise UsageError(str(answer["reason"]), hint=str(answer["hint"]) or None)
        case "unchanged":
            numbers = ", ".join(f"{role} {number}" for role, number in request.replicas.items())
            console.write(f"nothing to do: the run has {numbers} already")
        case "possible":
            console.write(f"{format_replicas(answer['replicas'])}: possible; nothing was changed")
        case _:
            return False
    return True


class _Asked:
    """A request, and what the launcher says of it in `events.jsonl` from now on.

    Args:
        news: the run.
        deadline: until when it is waited for, by the monotonic clock.
    """

    def __init__(self, news: RunView, deadline: float) -> None:
        self._news = news
        self._deadline = deadline
        self._path = news.path / EVENTS_FILE
        self._read = self._path.stat().st_size if self._path.exists() else 0
        self.number = ""

    def hear(self, kind: str) -> Mapping[str, Any]:
        """Waits for an event about the request.

        Raises:
            TfdistError: the run ends before that.
            TimeoutExceeded: it takes too long.
        """
        while True:
            alive = launcher_of(self._news.path) == self._news.launcher
            if alive and kind == "scale":
                self._knock()
            for event in self._new():
                if event.get("event") == kind and event.get("request") == self.number:
                    return event
                if event.get("event") == "phase" and event.get("phase") == "ended":
                    alive = False
            if not alive:
                raise TfdistError(
                    f"{self._news.path.name} has ended before it went on with other numbers of tasks",
                    hint=f"tfdist status {self._news.path} says how",
                )
            if time.monotonic() >= self._deadline:
                raise TimeoutExceeded(
                    "the launcher has not answered in time" if kind == "scale" else "the training does not go on yet",
                    hint=f"tfdist status {self._news.path} says what it does",
                )
            time.sleep(_PERIOD)

    def _knock(self) -> None:
        """Tells the launcher of the request; one that has just begun may not have heard it the first time."""
        with suppress(psutil.NoSuchProcess):
            psutil.Process(self._news.launcher).send_signal(SIGNAL)

    def _new(self) -> Iterator[dict[str, Any]]:
        """The events that have been written since, whole lines of them."""
        try:
            file = open_file(self._path)
        except FileNotFoundError:
            return  # nothing has happened yet
        with file:
            file.seek(self._read)
            text, line_feed, _ = file.read().rpartition(b"\n")
        self._read += len(text + line_feed)
        yield from parse_lines(text.split(b"\n"))
