"""`tfdist role`: runs one task in the foreground, in a terminal, a container or a scheduler."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from pydantic import ValidationError

from tfdist_cli.cli.console import console
from tfdist_cli.cli.options import CommandArgument, RecipeOption, SetOption
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.local.affinity import bind
from tfdist_cli.launch.manual import record_start
from tfdist_cli.launch.run.directory import chosen_location
from tfdist_cli.launch.slurm.added_task import find_added_task, is_added, write_addresses
from tfdist_cli.launch.slurm.task_environment import StepTask, find_step_task, in_step
from tfdist_cli.plan.machine import NO_PROXY, Machine
from tfdist_cli.plan.plan import PlannedTask, fixed_addresses, plan_task
from tfdist_cli.plan.resources import allocate, make_resources
from tfdist_cli.protocol.environment import JOIN_ADDRESS, RUN_DIR, RUN_URL, START_TIMEOUT, Environment
from tfdist_cli.requirements import require_tensorflow
from tfdist_cli.run_storage.recipe import CONTENT, RecipeFetcher
from tfdist_cli.spec.loading.load import load_recipe, load_run
from tfdist_cli.spec.path_scheme import Location, Url, refuse_scheme
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.sections.role_spec import RoleSpec
from tfdist_cli.spec.sections.secret import read_secrets
from tfdist_cli.spec.strategies import decides
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.task.launcher_exit import exit_with_launcher
from tfdist_cli.task.main import exit_now, run_task
from tfdist_cli.task.slurm_step import ATTEMPT, fork_task

EXAMPLES = (
    "tfdist role --task ps:0 --cluster cluster.yaml",
    "tfdist role --task worker:1 --cluster cluster.yaml -- python train.py",
    "tfdist role --task worker:5 --cluster cluster.yaml",
    "tfdist role --task chief:0 --cluster cluster.yaml --run-dir s3://bucket/runs/digits",
    "TF_CONFIG='{...}' tfdist role --recipe recipe.yaml",
    "srun --ntasks=5 tfdist role --cluster cluster.yaml",
)
DEFAULT_RUNS = Path("runs")
_DECIDED_HERE = (RUN_DIR, "GLIBC_TUNABLES", *NO_PROXY)
"""Variables that are derived from those of a scheduler and replace them."""


def role(  # noqa: PLR0913 a parameter is an option
    task: Annotated[
        str | None,
        typer.Option(help="The task, such as worker:1; by default the one of TF_CONFIG.", show_default=False),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option("--cluster", "-c", help="The cluster file; by default TF_CONFIG describes the cluster."),
    ] = None,
    recipe: RecipeOption = None,
    settings: SetOption = None,
    *,
    run_dir: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|URL",
            help="The run directory, for metrics, checkpoints and exports, also in a bucket: s3://bucket/run. Default: "
            "runs/NAME.",
        ),
    ] = None,
    start_timeout: Annotated[
        float | None, typer.Option(help="Seconds to wait for the other tasks. Default: 120.")
    ] = None,
    planned: Annotated[
        bool,
        typer.Option("--planned", help="Trust the environment: the plan of a launcher has set all of it."),
    ] = False,
    command: CommandArgument = None,
) -> None:
    """Run one task of a cluster in the foreground.

    Run this command once for each task, each in its own terminal, container or host: the tasks train together as with
    `tfdist launch`. Tasks without an address use this machine's ports from 2222 on. If TF_CONFIG is set, a ps or a
    worker of parameter servers needs no option; other tasks need --recipe. Under Slurm's srun a task needs --cluster
    only: Slurm's variables name the task and the addresses.

    A worker of parameter servers may start while the others train, with an index below the max of its role: it joins
    them. SIGTERM makes it leave. In a job of Slurm, it joins the job of the run directory. It cannot join a run of
    `tfdist launch`, whose tasks have a secret: use `tfdist scale` there.

    The command plans the task's environment (GPUs, threads, proxies) for this machine and then replaces itself with the
    task's program.

    With a run directory in a bucket, all tasks get the same address. The chief downloads the run if its disk has none
    of it, and uploads it every 10 s and at the end. A chief that replaces a killed one first waits up to 60 s for a
    sign of life of the other.
    """
    exit_with_launcher()
    refuse_scheme(os.environ.get(RUN_DIR, ""))
    at = chosen_location(run_dir)
    if start_timeout is not None:
        os.environ[START_TIMEOUT] = str(start_timeout)
    spec, trained = _load(cluster, recipe, settings or (), at)
    if planned:
        _check_environment(task, run_dir)
        _make_run_dir(Path(os.environ[RUN_DIR]))
        if os.environ.get(RUN_URL):
            trained = _upload_as_chief(Url(os.environ[RUN_URL]), trained, command)
        if command:
            _exec(command, os.environ)
        require_tensorflow()
        exit_now(run_task(trained))
    url = _url(spec, at)
    own, slot = _plan(spec, task, at if isinstance(at, Path) else _local_folder(url), stored=url is not None)
    files = [*_option("--cluster", cluster), *_option("--recipe", recipe)]
    again = [sys.executable, "-m", "tfdist_cli", "role", "--task", str(own.task), *files, "--planned"]
    again += (f"--set={each}" for each in settings or ())
    if trained and trained.source:
        own = replace(own, env={**own.env, CONTENT: trained.source.sha256})
    if url is None:
        environment = dict(_task_environment(own, slot))
        if slot is None and spec is not None and not in_step():
            environment |= record_start(Path(own.env[RUN_DIR]), own, spec, None if command else trained)
        _exec(command or again, environment, own.resources.cores)
    own = replace(own, env={**own.env, RUN_URL: str(url)})
    arguments = [*again, *(["--", *command] if command else [])]
    _exec(arguments, _task_environment(own, slot), own.resources.cores)


def _load(
    cluster: Path | None, recipe: Path | None, settings: Sequence[str], at: Location | None
) -> tuple[Cluster | None, Recipe | None]:
    """Reads the files. A recipe in a storage service has the content with which the run has begun."""
    run = at or (Path(os.environ[RUN_DIR]) if os.environ.get(RUN_DIR) else None)
    fetcher = RecipeFetcher(run)
    spec, trained = load_run(cluster, recipe, settings, fetch=fetcher) if cluster else (None, None)
    if recipe and not cluster:
        trained = load_recipe(recipe, settings, fetch=fetcher)
    if run is None and trained and trained.source and (named := _url(spec, None)):
        return _load(cluster, recipe, settings, named)  # the cluster file names the run
    console.print_warnings(fetcher.warnings)
    return spec, trained


def _url(cluster: Cluster | None, chosen: Location | None) -> Url | None:
    """Returns the address of the run directory in a storage service; None if it is only on this machine."""
    if isinstance(chosen, Url):
        return chosen
    if chosen is None and RUN_DIR not in os.environ and cluster and isinstance(cluster.run_dir, Url):
        return cluster.run_dir / cluster.name
    return None


def _local_folder(url: Url | None) -> Path | None:
    """Returns the folder of this machine for a run in a storage service; None if it is not in one."""
    return Path(os.environ.get(RUN_DIR) or DEFAULT_RUNS / url.name) if url else None


def _upload_as_chief(url: Url, recipe: Recipe | None, command: list[str] | None) -> Recipe | None:
    """Returns the recipe with its results in a storage service. The chief does not return, and runs in a child process.

    Raises:
        UsageError: the service, or the run in it, cannot be used.
    """
    from tfdist_cli.run_storage.chief import run_chief, uploads_here  # noqa: PLC0415 few tasks need it
    from tfdist_cli.run_storage.stored_run import in_service  # noqa: PLC0415 as above

    stored = in_service(recipe, url) if recipe and not command else None
    environment = Environment.read()
    if environment.is_chief and not uploads_here():
        own = command or [sys.executable, "-m", "tfdist_cli", *sys.argv[1:]]
        exit_now(run_chief(url, environment, stored, own))
    return stored


def _option(name: str, path: Path | None) -> list[str]:
    return [] if path is None else [name, str(path)]


def _check_environment(task: str | None, run_dir: str | None) -> None:
    """Rejects an environment that no launcher has set for this task.

    Raises:
        UsageError: a variable is missing, or an option contradicts the environment.
    """
    missing = next((name for name in ("TF_CONFIG", RUN_DIR) if not os.environ.get(name)), None)
    if missing:
        raise UsageError(
            f"--planned requires {missing}, which a launcher sets",
            code="not-planned",
            hint="remove --planned",
        )
    if run_dir is not None:
        raise UsageError(
            f"with --planned, {RUN_DIR} names the run directory", code="run-dir-twice", hint="remove --run-dir"
        )
    _check_task(task, Environment.read().task)


def _check_task(named: str | None, own: TaskId) -> None:
    try:
        task = own if named is None else TaskId.parse(named)
    except ValueError as error:
        raise UsageError(str(error), code="invalid-task", hint="remove --task") from None
    if task != own:
        raise UsageError(
            f"--task is {task}, but TF_CONFIG names {own}", code="task-differs-from-tf-config", hint="remove --task"
        )


@dataclass(frozen=True)
class _Slot:
    """A task's place in a Slurm step, which a parent process holds.

    Args:
        decides: whether the step ends with the task's exit code.
        joins: whether the task is added to a job that runs.
    """

    decides: bool
    joins: bool = False


def _plan(
    cluster: Cluster | None, task: str | None, run_dir: Path | None, *, stored: bool
) -> tuple[PlannedTask, _Slot | None]:
    """Plans this task for the machine that it runs on; it has a slot if a launcher follows it, or Slurm started it.

    Args:
        cluster: the cluster; None if `TF_CONFIG` describes it.
        task: the task; None if a scheduler names it.
        run_dir: the run directory on this machine; None for the default.
        stored: whether the run is in a storage service. Tasks on other machines then read no files in its folder here.

    Raises:
        UsageError: the task is not named.
    """
    if cluster is None:
        return _plan_as_scheduled(task, run_dir), None
    path = _run_dir(cluster, run_dir)
    if task is not None:
        named = cluster.task(task)
        if not is_added(cluster, named, path):
            return _plan_by_hand(cluster, named, run_dir), None
        place = find_added_task(cluster, named, path)
        slot = _Slot(decides=False, joins=True) if ATTEMPT in os.environ else None
        return _plan_in_step(cluster, place, run_dir), slot
    if in_step():
        place = find_step_task(cluster)
        if place.task == cluster.tasks[0] and not stored:
            write_addresses(path, place.addresses)
        return _plan_in_step(cluster, place, run_dir), _Slot(decides(cluster.strategy, place.task.role))
    raise UsageError("no task is named", code="no-task", hint="pass --task, such as --task worker:1")


def _plan_by_hand(cluster: Cluster, task: TaskId, run_dir: Path | None) -> PlannedTask:
    addresses, path = fixed_addresses(cluster), _run_dir(cluster, run_dir)
    here, machine = cluster.model_copy(update={"launcher": "local"}), Machine.here()
    share = allocate(here, {each: addresses[each] for each in cluster.listed_for(task)}, machine)[task]
    if task not in cluster.tasks:  # it joins others, which stay on their own cores
        share = replace(share, cores=())
    return plan_task(here, task, addresses, share, path, machine)


def _plan_as_scheduled(named: str | None, run_dir: Path | None) -> PlannedTask:
    """Plans a task of a scheduler that sets `TF_CONFIG`. Variables that the scheduler has set stay."""
    cluster, task = _cluster_of_tf_config()
    _check_task(named, task)
    own, machine = _plan_by_hand(cluster, task, run_dir), Machine.here()
    own = replace(own, resources=replace(own.resources, cores=()))  # the scheduler gives cores to tasks
    if "CUDA_VISIBLE_DEVICES" in os.environ and task.traits.sees_gpus:
        resources = replace(own.resources, gpus=machine.gpus)
        own = plan_task(cluster, task, fixed_addresses(cluster), resources, Path(own.env[RUN_DIR]), machine)
    kept = {name: os.environ[name] for name in own.env if name in os.environ and name not in _DECIDED_HERE}
    sees = {"CUDA_VISIBLE_DEVICES": own.env["CUDA_VISIBLE_DEVICES"]}
    return replace(own, env={**own.env, **kept, **sees})


def _plan_in_step(cluster: Cluster, place: StepTask, run_dir: Path | None) -> PlannedTask:
    """Plans the task of this process in a Slurm step, with the resources that Slurm has assigned to it."""
    spec = cluster.role(place.task)
    resources = make_resources(spec, place.cpus or 1, _gpus_in_step(cluster, spec, place))
    in_slurm = cluster.model_copy(update={"launcher": "slurm"})
    own = plan_task(in_slurm, place.task, place.addresses, resources, _run_dir(cluster, run_dir), Machine.here())
    if place.join_address is None:
        return own
    return replace(own, env={**own.env, JOIN_ADDRESS: str(place.join_address)})


def _gpus_in_step(cluster: Cluster, spec: RoleSpec, place: StepTask) -> tuple[str, ...]:
    """Returns the GPUs of the task. GPUs that Slurm assigns to several tasks of a node are divided among them.

    Raises:
        UsageError: Slurm has assigned another number of GPUs than `gpus` asks for.
    """
    if isinstance(spec.gpus, int) and spec.gpus not in (0, len(place.gpus)):
        raise UsageError(
            f"{place.task} requires {spec.gpus} GPUs, but Slurm has assigned {len(place.gpus)}",
            code="gpus-not-assigned",
            hint=f"srun --gpus-per-task={spec.gpus}; Slurm's gres.conf has to name the devices' files",
        )
    if spec.gpus:
        return place.gpus
    here = dict.fromkeys(place.sharers, place.addresses[place.task])
    on_node = cluster.model_copy(update={"launcher": "local"})
    return allocate(on_node, here, Machine(1, place.gpus))[place.task].gpus


def _run_dir(cluster: Cluster, chosen: Path | None) -> Path:
    given = os.environ.get(RUN_DIR)
    return (chosen or (Path(given) if given else (cluster.local_runs or DEFAULT_RUNS) / cluster.name)).absolute()


def _task_environment(own: PlannedTask, slot: _Slot | None) -> Mapping[str, str]:
    """Returns the whole environment of the task. With a slot, the rest of the command runs in a child process."""
    # Secrets that the environment already holds stay: this machine may lack their files.
    missing = {name: spec for name, spec in own.secrets.items() if name not in os.environ}
    secrets = read_secrets(missing, own.task.role)
    path = Path(own.env[RUN_DIR])
    _make_run_dir(path)
    if slot is not None:
        fork_task(own.task, path, own.as_json(), decides=slot.decides, joins=slot.joins)
        exit_with_launcher()
    return {**os.environ, **own.env, **secrets}


def _cluster_of_tf_config() -> tuple[Cluster, TaskId]:
    """Returns the cluster and the task that `TF_CONFIG` describes.

    Raises:
        UsageError: `TF_CONFIG` is not set, or describes no valid cluster.
    """
    if not os.environ.get("TF_CONFIG"):
        raise UsageError(
            "no cluster is named",
            code="no-cluster",
            hint="pass --cluster FILE and --task ROLE:INDEX, or set TF_CONFIG",
        )
    environment = Environment.read()
    hosts: dict[str, list[str]] = {}
    for member, address in environment.addresses.items():
        hosts.setdefault(member.role, []).append(str(address))
    roles = {role: {"hosts": addresses} for role, addresses in hosts.items()}
    roles.setdefault(environment.task.role, {})  # TF_CONFIG's cluster may omit the evaluator
    try:
        cluster = Cluster.model_validate({"name": "role", "strategy": environment.strategy, "roles": roles})
    except ValidationError as error:
        reasons = "; ".join(str(problem["msg"]) for problem in error.errors())
        message = f"TF_CONFIG describes no valid cluster: {reasons}"
        raise UsageError(message, code="invalid-tf-config", hint="see docs/reference/cluster.md") from error
    return cluster, environment.task


def _make_run_dir(run_dir: Path) -> None:
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot create the run directory {run_dir}: {error.strerror}",
            code="run-dir-not-writable",
            hint="choose another one with --run-dir",
        ) from error


def _exec(command: list[str], env: Mapping[str, str], cores: Collection[int] = ()) -> NoReturn:
    """Replaces this process with another program: libraries read many variables only when a process starts.

    Args:
        command: the program and its arguments.
        env: its environment.
        cores: those that it stays on; none for all.

    Raises:
        UsageError: the program cannot be executed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    bind(os.getpid(), cores)
    try:
        os.execvpe(command[0], command, env)  # noqa: S606 the user's own program, as an argv
    except OSError as error:
        raise UsageError(
            f"cannot execute {command[0]!r}: {error.strerror}",
            code="program-not-executable",
            hint="pass a program that is on PATH after '--'",
        ) from error
