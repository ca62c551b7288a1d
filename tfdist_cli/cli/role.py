"""`tfdist role`: one task in the foreground, for a terminal, a container or a scheduler."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from tfdist_cli.cli.options import CommandArgument, RecipeOption, SetOption
from tfdist_cli.environment import Environment
from tfdist_cli.errors import UsageError
from tfdist_cli.masking import SECRETS
from tfdist_cli.plan import PlannedTask, fixed_addresses, make_plan, plan_task
from tfdist_cli.requirements import require_tensorflow
from tfdist_cli.resources import Machine, make_resources, share_out
from tfdist_cli.slurm import find_place, in_step
from tfdist_cli.spec.cluster import Cluster, decides
from tfdist_cli.spec.load import load_recipe, load_run
from tfdist_cli.spec.recipe import Recipe
from tfdist_cli.spec.secret import read_secrets
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.task.lifeline import tie_to_launcher
from tfdist_cli.task.main import leave, run_task
from tfdist_cli.task.slot import occupy

EXAMPLES = (
    "tfdist role --task ps:0 --cluster cluster.yaml",
    "tfdist role --task worker:1 --cluster cluster.yaml -- python train.py",
    "TF_CONFIG='{...}' tfdist role --recipe recipe.yaml",
    "srun --ntasks=5 tfdist role --cluster cluster.yaml",
)
DEFAULT_RUNS = Path("runs")


def role(
    task: Annotated[
        str | None,
        typer.Option(help="Which task this is, such as worker:1; by default TF_CONFIG says.", show_default=False),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option("--cluster", "-c", help="The cluster file; without it TF_CONFIG describes the cluster."),
    ] = None,
    recipe: RecipeOption = None,
    settings: SetOption = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Where the chief writes metrics, checkpoints and exports; runs/NAME by default."),
    ] = None,
    start_timeout: Annotated[float | None, typer.Option(help="Seconds to wait for the other tasks; 120.")] = None,
    command: CommandArgument = None,
) -> None:
    """Run one task of a cluster in the foreground.

    Started once for each task, each in its own terminal, container or host, they train together as `tfdist launch`
    does. Tasks without an address take this machine's ports from 2222 on. With TF_CONFIG set, as schedulers do, a ps
    or a worker of parameter servers needs no option, and the others need a --recipe. Started by Slurm's srun, a task
    needs the --cluster alone: Slurm's variables say which task it is, and where the others are.
    """
    tie_to_launcher()
    if start_timeout is not None:
        os.environ["TFDIST_START_TIMEOUT"] = str(start_timeout)
    if cluster is not None:
        spec, trained = load_run(cluster, recipe, settings or ())
        if task is None and in_step():
            _enter_step(spec, run_dir)
        elif task is None:
            raise UsageError("which task is this?", hint="name it with --task, such as --task worker:1")
        else:
            _enter(_planned(spec, trained, spec.task(task), run_dir))
    else:
        spec, own = _cluster_of_tf_config()
        if task is not None and spec.task(task) != own:
            raise UsageError(f"TF_CONFIG says that this is {own}, not {task}", hint="leave out --task")
        trained = load_recipe(recipe, settings or ()) if recipe else None
        _enter(_planned(spec, trained, own, run_dir), keep=True)
    if command:
        _execute(command)
    require_tensorflow()
    leave(run_task(trained))


def _planned(cluster: Cluster, recipe: Recipe | None, task: TaskId, run_dir: Path | None) -> PlannedTask:
    path = _run_dir(cluster, run_dir)
    plan = make_plan(cluster, recipe, addresses=fixed_addresses(cluster), run_dir=path, machine=Machine.here())
    return plan[task]


def _run_dir(cluster: Cluster, chosen: Path | None) -> Path:
    given = os.environ.get("TFDIST_RUN_DIR")
    return (chosen or (Path(given) if given else (cluster.run_dir or DEFAULT_RUNS) / cluster.name)).absolute()


def _enter_step(cluster: Cluster, run_dir: Path | None) -> None:
    """Takes the task's place in a step of Slurm's: from here on this is a process of its own, which is watched."""
    place = find_place(cluster)
    role, path = cluster.role(place.task), _run_dir(cluster, run_dir)
    gpus = place.gpus
    if not role.gpus:  # what Slurm has given to the node, the tasks there share
        here = {task: at for task, at in place.addresses.items() if at.host == place.addresses[place.task].host}
        on_node = cluster.model_copy(update={"launcher": "local"})
        gpus = share_out(on_node, here, Machine(1, place.gpus))[place.task].gpus
    resources = make_resources(role, place.cpus or 1, gpus)
    _enter(plan_task(cluster, place.task, place.addresses, resources, path))
    occupy(place.task, path, decides=decides(cluster.strategy, place.task))
    tie_to_launcher()


def _enter(planned: PlannedTask, *, keep: bool = False) -> None:
    """Sets the task's environment; when `keep` says so, what a scheduler has set already stays.

    The run directory and the hosts that no proxy is asked for are made of what was set.
    """
    for name, value in planned.env.items():
        if not keep or name not in os.environ or name == "TFDIST_RUN_DIR" or "proxy" in name.lower():
            os.environ[name] = value
    # What started this task may have given it its secrets, and be the only one that can.
    missing = {name: spec for name, spec in planned.secrets.items() if name not in os.environ}
    os.environ.update(read_secrets(missing, planned.task.role))
    if planned.secrets:
        os.environ[SECRETS] = ",".join(planned.secrets)
    _make(Path(os.environ["TFDIST_RUN_DIR"]))


def _cluster_of_tf_config() -> tuple[Cluster, TaskId]:
    """The cluster that `TF_CONFIG` describes, as if a file had said it."""
    if not os.environ.get("TF_CONFIG"):
        raise UsageError(
            "nothing says which cluster this task belongs to",
            hint="name a file with --cluster and a task with --task, or set TF_CONFIG",
        )
    environment = Environment.read()
    hosts: dict[str, list[str]] = {}
    for member, address in environment.addresses.items():
        hosts.setdefault(member.role, []).append(str(address))
    roles = {role: {"hosts": addresses} for role, addresses in hosts.items()}
    roles.setdefault(environment.task.role, {})  # an evaluator may be left out of its own cluster
    try:
        cluster = Cluster.model_validate({"name": "role", "strategy": environment.strategy, "roles": roles})
    except ValidationError as error:
        reasons = "; ".join(str(problem["msg"]) for problem in error.errors())
        message = f"TF_CONFIG describes no cluster that can train: {reasons}"
        raise UsageError(message, hint="see docs/cluster.md") from error
    return cluster, environment.task


def _make(run_dir: Path) -> None:
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the run directory {run_dir} cannot be made: {error.strerror}", hint="name another one with --run-dir"
        ) from error


def _execute(command: list[str]) -> None:
    try:
        os.execvp(command[0], command)  # noqa: S606 the user's own program, as an argv
    except OSError as error:
        raise UsageError(
            f"{command[0]!r} cannot be run: {error.strerror}", hint="name a program after '--' that is on PATH"
        ) from error
