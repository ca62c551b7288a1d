"""`tfdist scale`: changes the number of tasks of a running job."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from tfdist_cli.cli.console import console
from tfdist_cli.cli.console.progress import scaled_text
from tfdist_cli.cli.options import LATEST, seconds_option
from tfdist_cli.errors import TfdistError, TimeoutExceeded, UsageError
from tfdist_cli.launch.run.directory import has_checkpoints
from tfdist_cli.launch.run.history import Outcome, RunView
from tfdist_cli.launch.run.report import format_replicas
from tfdist_cli.launch.run.requests import Answers, ScaleRequest, new_id
from tfdist_cli.plan.plan import CLUSTER_FILE
from tfdist_cli.runs.source import RunSource, open_run
from tfdist_cli.spec.loading.load import load_cluster, resized
from tfdist_cli.spec.roles import ROLES, Role
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.role_spec import RoleSpec

EXAMPLES = (
    "tfdist scale worker=4",
    "tfdist scale runs/digits-20260102-030405 worker=3 ps=2",
    "tfdist scale worker=4 --dry-run",
    "tfdist scale s3://bucket/runs/digits worker=4",
)
_HOW = "write ROLE=N, such as worker=4"
_NUMBER = re.compile(r"[a-z_]+=.*", re.DOTALL)


def scale(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] ROLE=N...",
            help="The run directory, also in a bucket; runs/latest by default. Then the new number of tasks of each "
            "role that changes.",
            show_default=False,
        ),
    ],
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check whether the change is possible.")] = False,
    wait: Annotated[bool, typer.Option(help="Wait until the training has the new size.")] = True,
    timeout: Annotated[float, seconds_option("Seconds to wait.")] = 300.0,
) -> None:
    """Change the number of tasks of a role while a run trains.

    Workers and data workers of parameter servers, and evaluators, join and leave while the others continue, up to the
    role's max in the cluster file. For every other change the training saves a checkpoint, all tasks exit, and the
    new tasks continue from that checkpoint: ports and cores are assigned anew, variables are distributed over the new
    ps, and the data is divided among the new workers. Runs of a program and runs without checkpoints cannot be changed
    in this way. The launcher keeps running, and no restart is counted. The same rules as for the cluster file apply.

    A run in a bucket, s3://bucket/run, is scaled from any machine: its launcher looks for requests there every 10 s.

    A run that has ended continues with other numbers by
    tfdist launch CLUSTER --run-dir RUN --set roles.worker.replicas=4

    Exit codes: 0 the training continues with these numbers, or already has them; 1 the run ended before, a task failed
    to join or had to be killed, or the training cannot run with these numbers and continues as before; 2 the request
    was rejected; 124 --timeout was exceeded.
    """
    run, replicas = _read(arguments)
    with open_run(run) as source:
        _scale(source, source.view(), ScaleRequest(new_id(), replicas, dry_run), time.monotonic() + timeout, wait=wait)


def _scale(source: RunSource, view: RunView, request: ScaleRequest, deadline: float, *, wait: bool) -> None:
    """Has a run scaled, and prints what happens."""
    if view.outcome is not Outcome.RUNNING:
        raise _not_running(view, request.replicas)
    contact = source.contact(view)
    answers = Answers(contact, view, request.request, "scaled", deadline)
    with contact.post(request):
        answer = answers.first("scale")
    if answer is None:
        raise _timeout("the launcher has not answered in time", view)
    if _print_answer(answer, request):
        return
    what = format_replicas(answer["replicas"])
    console.write(f"{what}: {_way(answer)}")
    if wait:
        scaled = answers.next("scaled")
        if scaled is None:
            raise _timeout("the training has not continued yet", view)
        if scaled["failed"]:
            names = ", ".join(scaled["failed"])
            raise TfdistError(
                f"{names} failed to join; the training continues without",
                code="join-failed",
                hint=f"tfdist logs {view.shown} --task {scaled['failed'][0]} shows why",
            )
        if scaled.get("reverted"):
            raise TfdistError(
                f"the training cannot run with {what}, and continues as before: {scaled['reverted']}",
                code="resize-reverted",
                hint=f"tfdist logs {view.shown} has the output of the tasks that failed",
            )
        console.write(f"{what}: {scaled_text(scaled)}")
        if scaled.get("lost"):
            raise _lost(scaled["lost"], view, live=bool(answer.get("live")))


def _not_running(view: RunView, replicas: Mapping[Role, int]) -> UsageError:
    """The error for a run that has ended. Its hint is a launch with these numbers of tasks, if it can have them."""
    path, command, problem = view.path / CLUSTER_FILE, "", ""
    if path.is_file():  # the copy of a run in a bucket may lack it
        cluster = load_cluster(path)
        command = "" if cluster.recipe else " -- COMMAND"
        try:
            resized(_without_chosen_ports(cluster), None, replicas)
        except UsageError as error:
            problem = error.message
    resumes = has_checkpoints(view.path) or bool(view.result.get("checkpoints"))
    what = "continues from its last checkpoint" if resumes else "launches it again; no checkpoint of it is known"
    again = f"tfdist launch CLUSTER --run-dir {view.shown} {_settings(replicas)}{command} {what}"
    return UsageError(
        f"{view.path.name} is not running: it is {view.outcome.value}",
        code="run-not-running",
        hint=f"another launch cannot have these numbers either: {problem}" if problem else again,
    )


def _without_chosen_ports(cluster: Cluster) -> Cluster:
    """The cluster of a run without addresses of one machine: the launcher has chosen most of their ports."""
    chosen: dict[str, RoleSpec] = {
        role: spec.model_copy(update={"hosts": None, "replicas": spec.count})
        for role in ROLES
        if (spec := cluster.roles.of(role)) and spec.hosts and all(host.is_loopback for host in spec.hosts)
    }
    return cluster.model_copy(update={"roles": cluster.roles.model_copy(update=chosen)})


def _lost(tasks: Sequence[str], view: RunView, *, live: bool) -> TfdistError:
    """The error for tasks that were killed, or failed, when they were to leave or to save."""
    names = ", ".join(tasks)
    cost = "others take their unfinished steps" if live else "the steps since the last checkpoint are taken again"
    return TfdistError(
        f"{names} did not {'leave' if live else 'save'} in time, or failed: {cost}",
        code="lost-while-scaling",
        hint=f"tfdist logs {view.shown} --task {tasks[0]} shows why; "
        "tfdist launch --shutdown-timeout SECONDS gives the tasks more time",
    )


def _timeout(message: str, view: RunView) -> TimeoutExceeded:
    return TimeoutExceeded(message, code="scale-timeout", hint=f"tfdist status {view.shown} shows its state")


def _way(answer: Mapping[str, Any]) -> str:
    """How the training gets its new size."""
    if answer.get("live"):
        return "the tasks join or leave while the others continue"
    return f"the training saves a checkpoint and continues with these numbers{_because(answer)}"


def _because(answer: Mapping[str, Any]) -> str:
    """Why the tasks cannot join or leave while the others continue, if that is not so for each task of the role."""
    return f" ({answer['reason']})" if answer.get("reason") else ""


def _read(arguments: list[str]) -> tuple[str, dict[Role, int]]:
    """Returns the run directory or its address, and the new number of tasks of each role.

    Raises:
        UsageError: an argument is no `ROLE=N`, or a role is given twice.
    """
    given = [] if _NUMBER.fullmatch(arguments[0]) else [arguments[0]]
    replicas: dict[Role, int] = {}
    for text in arguments[len(given) :]:
        name, equals, number = text.partition("=")
        role = next((role for role in ROLES if role == name), None)
        if role is None:
            near = get_close_matches(name, ROLES, n=1)
            meant = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(ROLES)}"
            raise UsageError(f"{text}: unknown role {name!r}, {meant}", code="unknown-role", hint=_HOW)
        if not equals:
            raise UsageError(f"{text}: expected {role}=N, a number of tasks", code="wrong-type", hint=_HOW)
        if not (number.isascii() and number.isdigit() and len(number) < 10):
            raise UsageError(f"{text}: expected a number of tasks, got {number!r}", code="wrong-type", hint=_HOW)
        if role in replicas:
            raise UsageError(f"{text}: {role} is given twice", code="role-given-twice", hint=f"write {role}=N once")
        replicas[role] = int(number)
    if not replicas:
        raise UsageError("no number of tasks is given", code="no-replicas", hint=_HOW)
    return given[0] if given else str(LATEST), replicas


def _settings(replicas: Mapping[Role, int]) -> str:
    return " ".join(f"--set roles.{role}.replicas={number}" for role, number in replicas.items())


def _print_answer(answer: Mapping[str, Any], request: ScaleRequest) -> bool:
    """Prints an answer that ends the command; returns False if the launcher has accepted the request.

    Raises:
        UsageError: the launcher has rejected the request.
    """
    match answer["answer"]:
        case "refused":
            raise UsageError(str(answer["reason"]), code="scale-rejected", hint=str(answer["hint"]) or None)
        case "unchanged":
            numbers = ", ".join(f"{role} {number}" for role, number in request.replicas.items())
            console.write(f"nothing to do: the run already has {numbers}")
        case "possible":
            way = "while the others continue" if answer["live"] else f"through a checkpoint{_because(answer)}"
            console.write(f"{format_replicas(answer['replicas'])}: possible, {way}; nothing was changed")
        case _:
            return False
    return True
