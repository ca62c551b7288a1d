"""`tfdist role`: one task in the foreground, for a terminal, a container or a scheduler."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from pydantic import ValidationError

from tfdist_cli.cli.options import CommandArgument, RecipeOption, SetOption
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.slurm.task_environment import StepTask, find_step_task, in_step
from tfdist_cli.plan.machine import NO_PROXY, Machine
from tfdist_cli.plan.plan import PlannedTask, fixed_addresses, make_plan, plan_task
from tfdist_cli.plan.resources import allocate, make_resources
from tfdist_cli.protocol.environment import RUN_DIR, START_TIMEOUT, Environment
from tfdist_cli.requirements import require_tensorflow
from tfdist_cli.spec.loading.load import load_recipe, load_run
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.role_spec import RoleSpec
from tfdist_cli.spec.sections.secret import read_secrets
from tfdist_cli.spec.strategies import decides
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.task.launcher_exit import exit_with_launcher
from tfdist_cli.task.main import exit_now, run_task
from tfdist_cli.task.slurm_step import fork_task

EXAMPLES = (
    "tfdist role --task ps:0 --cluster cluster.yaml",
    "tfdist role --task worker:1 --cluster cluster.yaml -- python train.py",
    "TF_CONFIG='{...}' tfdist role --recipe recipe.yaml",
    "srun --ntasks=5 tfdist role --cluster cluster.yaml",
)
DEFAULT_RUNS = Path("runs")
_DECIDED_HERE = (RUN_DIR, "GLIBC_TUNABLES", *NO_PROXY)
"""Variables that are made of what a scheduler has set, and take its place."""


def role(  # noqa: PLR0913 a parameter is an option
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
    *,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Where the chief writes metrics, checkpoints and exports; runs/NAME by default."),
    ] = None,
    start_timeout: Annotated[float | None, typer.Option(help="Seconds to wait for the other tasks; 120.")] = None,
    planned: Annotated[
        bool,
        typer.Option("--planned", help="Trust the environment as it is: a launcher's plan has decided all of it."),
    ] = False,
    command: CommandArgument = None,
) -> None:
    """Run one task of a cluster in the foreground.

    Started once for each task, each in its own terminal, container or host, they train together as `tfdist launch`
    does. Tasks without an address take this machine's ports from 2222 on. With TF_CONFIG set, as schedulers do, a ps
    or a worker of parameter servers needs no option, and the others need a --recipe. Started by Slurm's srun, a task
    needs the --cluster alone: Slurm's variables say which task it is, and where the others are.

    It plans the task's environment (GPUs, threads, proxies) for the machine that it runs on, and then becomes the task.
    """
    exit_with_launcher()
    if start_timeout is not None:
        os.environ[START_TIMEOUT] = str(start_timeout)
    spec, trained = load_run(cluster, recipe, settings or ()) if cluster else (None, None)
    if recipe and not cluster:
        trained = load_recipe(recipe, settings or ())
    if planned:
        _check_environment(task, run_dir)
        _make(Path(os.environ[RUN_DIR]))
        if command:
            _become(command, os.environ)
        require_tensorflow()
        exit_now(run_task(trained))
    own = _plan(spec, task, run_dir)
    files = [*_option("--cluster", cluster), *_option("--recipe", recipe)]
    again = [sys.executable, "-m", "tfdist_cli", "role", "--task", str(own.task), *files, "--planned"]
    again += (f"--set={each}" for each in settings or ())
    _become(command or again, _enter(own, decides(spec.strategy, own.task.role) if spec and not task else None))


def _option(name: str, path: Path | None) -> list[str]:
    return [] if path is None else [name, str(path)]


def _check_environment(task: str | None, run_dir: Path | None) -> None:
    """Refuses an environment that no launcher has set for this task."""
    missing = next((name for name in ("TF_CONFIG", RUN_DIR) if not os.environ.get(name)), None)
    if missing:
        raise UsageError(
            f"with --planned a launcher has set the environment, but {missing} is not set", hint="leave out --planned"
        )
    if run_dir is not None:
        raise UsageError(f"with --planned {RUN_DIR} says where the run is kept", hint="leave out --run-dir")
    _check_task(task, Environment.read().task)


def _check_task(named: str | None, own: TaskId) -> None:
    try:
        task = own if named is None else TaskId.parse(named)
    except ValueError as error:
        raise UsageError(str(error), hint="leave out --task") from None
    if task != own:
        raise UsageError(f"TF_CONFIG says that this is {own}, not {task}", hint="leave out --task")


def _plan(cluster: Cluster | None, task: str | None, run_dir: Path | None) -> PlannedTask:
    """Plans this task for the machine that it runs on."""
    if cluster is None:
        return _plan_as_scheduled(task, run_dir)
    if task is not None:
        return _plan_by_hand(cluster, cluster.task(task), run_dir)
    if in_step():
        return _plan_in_step(cluster, find_step_task(cluster), run_dir)
    raise UsageError("which task is this?", hint="name it with --task, such as --task worker:1")


def _plan_by_hand(cluster: Cluster, task: TaskId, run_dir: Path | None) -> PlannedTask:
    addresses, path = fixed_addresses(cluster), _run_dir(cluster, run_dir)
    here = cluster.model_copy(update={"launcher": "local"})
    return make_plan(here, None, addresses=addresses, run_dir=path, machine=Machine.here())[task]


def _plan_as_scheduled(named: str | None, run_dir: Path | None) -> PlannedTask:
    """Plans what a scheduler that has set `TF_CONFIG` has left open; all else that it has set stays."""
    cluster, task = _cluster_of_tf_config()
    _check_task(named, task)
    own, machine = _plan_by_hand(cluster, task, run_dir), Machine.here()
    if "CUDA_VISIBLE_DEVICES" in os.environ and task.traits.sees_gpus:
        resources = replace(own.resources, gpus=machine.gpus)
        own = plan_task(cluster, task, fixed_addresses(cluster), resources, Path(own.env[RUN_DIR]), machine)
    kept = {name: os.environ[name] for name in own.env if name in os.environ and name not in _DECIDED_HERE}
    sees = {"CUDA_VISIBLE_DEVICES": own.env["CUDA_VISIBLE_DEVICES"]}
    return replace(own, env={**own.env, **kept, **sees})


def _plan_in_step(cluster: Cluster, place: StepTask, run_dir: Path | None) -> PlannedTask:
    """Plans the task that this process is in a step of Slurm's, of what Slurm has given to it."""
    spec = cluster.role(place.task)
    resources = make_resources(spec, place.cpus or 1, _gpus_in_step(cluster, spec, place))
    in_slurm = cluster.model_copy(update={"launcher": "slurm"})
    return plan_task(in_slurm, place.task, place.addresses, resources, _run_dir(cluster, run_dir), Machine.here())


def _gpus_in_step(cluster: Cluster, spec: RoleSpec, place: StepTask) -> tuple[str, ...]:
    """The task's own GPUs; those that Slurm gives to several tasks of a node together, these tasks share."""
    if isinstance(spec.gpus, int) and spec.gpus not in (0, len(place.gpus)):
        raise UsageError(
            f"{place.task} is to have {spec.gpus} GPUs, but Slurm lets it see {len(place.gpus)}",
            hint=f"srun --gpus-per-task={spec.gpus}; Slurm's gres.conf has to name the devices' files",
        )
    if spec.gpus:
        return place.gpus
    here = dict.fromkeys(place.sharers, place.addresses[place.task])
    on_node = cluster.model_copy(update={"launcher": "local"})
    return allocate(on_node, here, Machine(1, place.gpus))[place.task].gpus


def _run_dir(cluster: Cluster, chosen: Path | None) -> Path:
    given = os.environ.get(RUN_DIR)
    return (chosen or (Path(given) if given else (cluster.run_dir or DEFAULT_RUNS) / cluster.name)).absolute()


def _enter(own: PlannedTask, slot: bool | None) -> Mapping[str, str]:
    """The whole environment of the task; in a step of Slurm's this is a process of its own from here on.

    Args:
        own: the task.
        slot: in a step, whether the task's exit code is to be Slurm's as well; None outside of one.
    """
    # What started this task may have given it its secrets, and be the only one that can.
    missing = {name: spec for name, spec in own.secrets.items() if name not in os.environ}
    secrets = read_secrets(missing, own.task.role)
    path = Path(own.env[RUN_DIR])
    _make(path)
    if slot is not None:
        fork_task(own.task, path, own.as_json(), decides=slot)
        exit_with_launcher()
    return {**os.environ, **own.env, **secrets}


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
        raise UsageError(message, hint="see docs/reference/cluster.md") from error
    return cluster, environment.task


def _make(run_dir: Path) -> None:
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the run directory {run_dir} cannot be made: {error.strerror}", hint="name another one with --run-dir"
        ) from error


def _become(command: list[str], env: Mapping[str, str]) -> NoReturn:
    """Goes on as another program: much of an environment counts only where a process has it from its start."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], command, env)  # noqa: S606 the user's own program, as an argv
    except OSError as error:
        raise UsageError(
            f"{command[0]!r} cannot be run: {error.strerror}", hint="name a program after '--' that is on PATH"
        ) from error
