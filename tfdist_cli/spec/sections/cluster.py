"""cluster.yaml: which tasks there are, where they listen, and how they train together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema, model_validator

from tfdist_cli.errors import InvalidValue, UsageError
from tfdist_cli.spec.address import LOOPBACK, Address
from tfdist_cli.spec.launchers import LAUNCHERS, LauncherTraits, check_launcher
from tfdist_cli.spec.roles import ROLES, Role
from tfdist_cli.spec.sections.compose import Compose
from tfdist_cli.spec.sections.engines import RaySpec, SparkSpec
from tfdist_cli.spec.sections.kubernetes import Kubernetes
from tfdist_cli.spec.sections.model import (
    VARIABLE_SCHEMA,
    Inconsistent,
    KeyProblem,
    LocationField,
    Sha256,
    SpecModel,
)
from tfdist_cli.spec.sections.role_spec import RestartSpec, Roles, RoleSpec, default_restart
from tfdist_cli.spec.sections.slurm import SlurmSpec
from tfdist_cli.spec.sections.ssh import HostName, HostSpec, SshSpec
from tfdist_cli.spec.strategies import (
    STRATEGIES,
    Communication,
    Strategy,
    holds_variables,
    is_replaceable,
    may_join,
    serves,
)
from tfdist_cli.spec.task_id import TaskId

LauncherName = Annotated[
    str,
    PlainValidator(check_launcher),
    WithJsonSchema({"anyOf": [{"type": "string", "enum": [*LAUNCHERS]}, VARIABLE_SCHEMA]}),
]
RESERVED_NAMES = (".", "..", "latest")
"""Names with another meaning in the folder of runs, where each run directory is named after its cluster."""
MOST_LETTERS = 100
"""The length of a name at most."""
_LAUNCHER_HELP = (
    "What starts the tasks: " + "; ".join(f"`{name}`, {row.summary}" for name, row in LAUNCHERS.items()) + "."
)
_STRATEGY_HELP = (
    "How the tasks train together: " + "; ".join(f"`{name}`, {row.summary}" for name, row in STRATEGIES.items()) + "."
)


def _check_name(name: str) -> str:
    if "/" in name or not name.isprintable():
        message = f"{name!r} cannot be the name of a folder: remove '/' and control characters"
        raise InvalidValue(message, code="invalid-name")
    if name in RESERVED_NAMES:
        raise InvalidValue(f"{name!r} cannot be the name of a run: it has another meaning", code="reserved-name")
    return name


class Cluster(SpecModel):
    """A cluster: its roles, its strategy, and the recipe it trains.

    Raises:
        Inconsistent: the roles don't fit the strategy, or two tasks have the same address.
    """

    name: Annotated[str, Field(min_length=1, max_length=MOST_LETTERS), AfterValidator(_check_name)] = "cluster"
    """The name of the cluster in run directories and tables. By default the file's name without its suffix."""
    strategy: Strategy = Field(description=_STRATEGY_HELP)
    communication: Communication | None = None
    """How the tasks of `multi_worker_mirrored` sum their gradients. `auto`, the default: over direct connections
    between the tasks; if they have GPUs, by NCCL, or by `ring` if NCCL is not installed. `ring`: TensorFlow's ring
    all-reduce over gRPC. `nccl`: NVIDIA's library; it is an error if a task has no GPU."""
    launcher: LauncherName = Field(default="local", description=_LAUNCHER_HELP)
    network: Literal["private", "host"] | None = None
    """The network of the tasks on this machine. `private`: a network namespace; no other process reaches the tasks, and
    they reach no other host. `host`: the network of this machine. By default `private` for a recipe that uses no
    storage service, where the system allows it, and otherwise `host`: for a program after `--`, and for tasks with
    addresses outside of this machine."""
    roles: Roles
    """The tasks, by role."""
    hosts: Annotated[list[HostName | HostSpec], Field(min_length=1)] | None = None
    """The machines on which `launcher: ssh` starts the tasks that have no address. Each is a name or a map."""
    ssh: SshSpec | None = None
    """How `launcher: ssh` connects to the machines, and what it copies to them."""
    slurm: SlurmSpec | None = None
    """How `launcher: slurm` submits the tasks."""
    compose: Compose | None = None
    """The containers of `launcher: compose`."""
    kubernetes: Kubernetes | None = None
    """The pods of `launcher: kubernetes`."""
    spark: SparkSpec | None = None
    """The application of `launcher: spark`."""
    ray: RaySpec | None = None
    """The placement group of `launcher: ray`."""
    recipe: LocationField | None = None
    """The recipe to train, a path relative to this file, or in a storage service: `s3://bucket/folder/digits.yaml`. The
    folder with the recipe and its module is then fetched: it is code that runs in every task."""
    recipe_sha256: Sha256 | None = None
    """The SHA-256 of the files in the folder of a recipe in a storage service. Other files are an error."""
    run_dir: LocationField | None = None
    """The folder in which each run gets its run directory, relative to this file, or in a storage service:
    `s3://bucket/runs`. Each is then uploaded from its folder in `runs`. By default `runs` in the current folder."""

    @property
    def recipe_file(self) -> Path | None:
        """The recipe's file on this machine. A loaded cluster has it, wherever the recipe is from."""
        return self.recipe if isinstance(self.recipe, Path) else None

    @model_validator(mode="after")
    def _is_consistent(self) -> Cluster:
        problems = [*_role_problems(self), *_address_problems(self), *_host_problems(self)]
        if problems:
            raise Inconsistent(problems)
        return self

    @property
    def local_runs(self) -> Path | None:
        """The folder of run directories on this machine; None for the default."""
        return self.run_dir if isinstance(self.run_dir, Path) else None

    @property
    def launcher_traits(self) -> LauncherTraits:
        """What is known of the launcher without importing it."""
        return LAUNCHERS[self.launcher]

    @property
    def over_ssh(self) -> SshSpec:
        """The `ssh` section, or its defaults."""
        return self.ssh or SshSpec()

    @property
    def machines(self) -> tuple[HostSpec, ...]:
        """The `hosts`, with the defaults of the `ssh` section filled in."""
        given = (HostSpec(address=host) if isinstance(host, str) else host for host in self.hosts or ())
        return tuple(self._filled_in(host) for host in given)

    def machine(self, name: str) -> HostSpec:
        """Returns the host with this address. A host that `hosts` does not list has the defaults only."""
        found = (host for host in self.machines if name in (host.address, host.reachable_as))
        return next(found, None) or self._filled_in(HostSpec(address=name))

    def _filled_in(self, host: HostSpec) -> HostSpec:
        ssh = self.over_ssh
        return host.model_copy(update={"user": host.user or ssh.user, "python": host.python or ssh.python})

    @property
    def tasks(self) -> tuple[TaskId, ...]:
        """All tasks: role after role in the order of `ROLES`."""
        return tuple(TaskId(role, index) for role in ROLES for index in range(self.roles.count(role)))

    @property
    def possible_tasks(self) -> tuple[TaskId, ...]:
        """The tasks, and those that may join while a training runs: as many of each role as its `max` says."""
        return tuple(TaskId(role, index) for role in ROLES for index in range(self.roles.capacity(role)))

    def listed_for(self, task: TaskId) -> tuple[TaskId, ...]:
        """Returns the tasks that a task knows of when it starts: those of the cluster, and up to itself."""
        others = set(self.tasks)
        return tuple(
            each
            for each in self.possible_tasks
            if each in others or (each.role == task.role and each.index <= task.index)
        )

    def task(self, text: str) -> TaskId:
        """Returns the task that a user names, such as `worker:1`. It may be one that joins a running training.

        Raises:
            UsageError: it is not the name of a task, or the cluster has no such task.
        """
        hint = f"its tasks are {', '.join(map(str, self.tasks))}"
        try:
            task = TaskId.parse(text)
        except InvalidValue as error:
            raise UsageError(str(error), code="unknown-task", hint=hint) from None
        if task in self.possible_tasks:
            return task
        spec = self.roles.of(task.role)
        if spec and spec.max is not None:
            last = TaskId(task.role, spec.capacity - 1)
            raise UsageError(
                f"the cluster {self.name!r} has at most {spec.capacity} {task.role} tasks, up to {last}: not {task}",
                code="task-above-max",
                hint=f"set roles.{task.role}.max to {task.index + 1} or more in the file with which the chief starts",
            )
        raise UsageError(f"the cluster {self.name!r} has no task {task}", code="unknown-task", hint=hint)

    def role(self, task: TaskId) -> RoleSpec:
        """Returns the part of the file that describes the task's role."""
        spec = self.roles.of(task.role)
        if spec is None:
            raise KeyError(str(task))
        return spec

    def restart(self, role: Role) -> RestartSpec:
        """Returns what happens when a task of the role fails, by the file or by default."""
        spec = self.roles.of(role)
        return (spec and spec.restart) or default_restart(self.strategy, role)

    def address(self, task: TaskId) -> Address:
        """Returns the task's address in the file, or port 0 of this machine for any free port."""
        hosts = self.role(task).hosts
        return Address(LOOPBACK, 0) if hosts is None else hosts[task.index]


def _role_problems(cluster: Cluster) -> Iterator[KeyProblem]:
    for role, traits in ROLES.items():
        count = cluster.roles.count(role)
        spec = cluster.roles.of(role)
        if spec and spec.max is not None and not may_join(cluster.strategy, role):
            message = f"no {role} of {cluster.strategy} can join a running training: remove max"
            yield KeyProblem(("roles", role, "max"), message, code="role-not-elastic")
        elif traits.singleton and cluster.roles.capacity(role) > 1 and count <= 1:
            message = f"a cluster has at most one {role}: max is not above 1"
            yield KeyProblem(("roles", role, "max"), message, code="too-many-tasks")
        if traits.singleton and count > 1:
            yield KeyProblem(("roles", role), f"a cluster has at most one {role}, not {count}", code="too-many-tasks")
    yield from _missing_partners(cluster.roles)
    yield from _restart_problems(cluster)
    yield from _strategy_problems(cluster)
    for role, traits in ROLES.items():
        spec = cluster.roles.of(role)
        if spec and spec.gpus and not traits.sees_gpus:
            message = f"a {role} does not use GPUs: remove gpus"
            yield KeyProblem(("roles", role, "gpus"), message, code="gpus-not-used")
    yield from _thread_problems(cluster)


def _strategy_problems(cluster: Cluster) -> Iterator[KeyProblem]:
    """Roles that the strategy requires, or does not use."""
    strategy, traits = cluster.strategy, STRATEGIES[cluster.strategy]
    for role, purpose in traits.required.items():
        if not cluster.roles.count(role):
            message = f"{strategy} needs a {role} to {purpose}: {_how_to_add(cluster.roles, role)}"
            yield KeyProblem(("roles", role), message, code="missing-role")
    counts = {role: count for role in ROLES if (count := cluster.roles.count(role))}
    for role in counts:
        if ROLES[role].holds_variables and not traits.has_ps:
            message = f"{strategy} has no parameter servers: remove {role}, or use 'strategy: parameter_server'"
            yield KeyProblem(("roles", role), message, code="role-not-used")
    if cluster.communication and not traits.together:
        message = f"{strategy} does not sum gradients over tasks: remove it, or use 'strategy: multi_worker_mirrored'"
        yield KeyProblem(("communication",), message, code="communication-not-used")
    training = sum(count for role, count in counts.items() if ROLES[role].trains)
    if traits.one_process and training != 1:
        many = f"{training} in chief and worker together" if training else "none"
        message = f"{strategy} trains in one process, a chief: roles has {many}"
        yield KeyProblem(("strategy",), message, code="not-one-process")


def _how_to_add(roles: Roles, role: Role) -> str:
    return f"write '{role}: {{}}' in roles" if roles.of(role) is None else "it has 0 replicas"


def _thread_problems(cluster: Cluster) -> Iterator[KeyProblem]:
    """Servers with one inter-op thread: blocked in a receive, it could not send what the other side waits for."""
    for role, traits in ROLES.items():
        spec = cluster.roles.of(role)
        runs_tensorflow = traits.in_tf_cluster and serves(cluster.strategy, role)
        if runs_tensorflow and spec and spec.threads and spec.threads.inter == 1:
            message = f"a {role} with one inter-op thread deadlocks: set 2 or more, or remove the key"
            yield KeyProblem(("roles", role, "threads", "inter"), message, code="too-few-threads")


def _missing_partners(roles: Roles) -> Iterator[KeyProblem]:
    """Roles that do nothing without another role, which is missing."""
    for role, traits in ROLES.items():
        other = traits.needs
        if other and roles.count(role) and not roles.count(other):
            message = f"a {role} does nothing without a {other}: {_how_to_add(roles, other)}"
            yield KeyProblem(("roles", role), message, code="missing-role")


def _restart_problems(cluster: Cluster) -> Iterator[KeyProblem]:
    for role, traits in ROLES.items():
        spec = cluster.roles.of(role)
        policy = spec and spec.restart and spec.restart.policy
        keys = ("roles", role, "restart", "policy")
        if policy == "replace" and not is_replaceable(cluster.strategy, role):
            lost = (
                "its variables are lost with it"
                if holds_variables(cluster.strategy, role)
                else "the others cannot continue without it"
            )
            message = f"a {role} of {cluster.strategy} cannot be replaced alone, {lost}: use 'job' or 'never'"
            yield KeyProblem(keys, message, code="invalid-restart-policy")
        if policy == "job" and traits.optional:
            message = f"the training continues without an {role}: use 'replace' or 'never'"
            yield KeyProblem(keys, message, code="invalid-restart-policy")


def _address_problems(cluster: Cluster) -> Iterator[KeyProblem]:
    addresses = {task: cluster.address(task) for task in cluster.possible_tasks if task.traits.listens}
    given = {task: address for task, address in addresses.items() if address.port}
    tasks_at: dict[Address, list[TaskId]] = {}
    for task, address in given.items():
        tasks_at.setdefault(address, []).append(task)
    for address, tasks in tasks_at.items():
        if len(tasks) > 1:
            message = f"{tasks[0]} and {tasks[1]} have the same address {address}"
            yield KeyProblem(("roles", tasks[-1].role, "hosts"), message, code="duplicate-address")
    remote = {task: address for task, address in given.items() if not address.is_loopback}
    if remote and cluster.network == "private":
        task, address = next(iter(remote.items()))
        message = f"a private network has only loopback addresses, and {task} has {address}: use 'host'"
        yield KeyProblem(("network",), message, code="private-network-impossible")
    if remote and not cluster.hosts:
        elsewhere = next(iter(remote.values()))
        for role in dict.fromkeys(task.role for task in addresses if task not in given):
            message = f"{elsewhere} is on another machine, and cannot reach tasks without an address: add {role}.hosts"
            yield KeyProblem(("roles", role), message, code="missing-address")


def _host_problems(cluster: Cluster) -> Iterator[KeyProblem]:
    names = [host.address for host in cluster.machines]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        message = f"{name} is listed more than once: list it once, with slots"
        yield KeyProblem(("hosts",), message, code="duplicate-host")
