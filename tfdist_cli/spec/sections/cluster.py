"""cluster.yaml: which tasks there are, where they listen, and how they train together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema, create_model, model_validator

from tfdist_cli.errors import UsageError
from tfdist_cli.spec.address import LOOPBACK, Address
from tfdist_cli.spec.launchers import LAUNCHERS, LauncherTraits, check_launcher
from tfdist_cli.spec.roles import ROLES, Role
from tfdist_cli.spec.sections.compose import Compose
from tfdist_cli.spec.sections.kubernetes import Kubernetes
from tfdist_cli.spec.sections.model import VARIABLE_SCHEMA, AddressField, Inconsistent, PathField, SpecModel
from tfdist_cli.spec.sections.resources import GpuMemoryField, GpusField, SizeField, ThreadsSpec
from tfdist_cli.spec.sections.secret import SecretSpec
from tfdist_cli.spec.sections.slurm import SlurmSpec
from tfdist_cli.spec.sections.ssh import HostName, HostSpec, SshSpec
from tfdist_cli.spec.strategies import STRATEGIES, Strategy, is_replaceable, serves
from tfdist_cli.spec.task_id import TaskId

LauncherName = Annotated[
    str,
    PlainValidator(check_launcher),
    WithJsonSchema({"anyOf": [{"type": "string", "enum": [*LAUNCHERS]}, VARIABLE_SCHEMA]}),
]

Found = tuple[tuple[str, ...], str]
"""The keys of the value to look at, and what is wrong with it."""


def _check_name(name: str) -> str:
    if "/" in name or not name.isprintable():
        raise ValueError(f"{name!r} cannot name a folder: no '/' and no control characters")
    if name in _TAKEN:
        raise ValueError(f"{name!r} cannot name a folder of runs: it means another one there")
    return name


_TAKEN = (".", "..", "latest")
"""What the folder of runs has of its own: a folder is named after the cluster."""


def _check_env(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        _check_variable(name, value)
    return env


def _check_secrets(secrets: dict[str, SecretSpec]) -> dict[str, SecretSpec]:
    for name in secrets:
        _check_variable(name)
        if "," in name:
            raise ValueError(f"{name!r} cannot name a secret: no ',' in its name")
    return secrets


def _check_variable(name: str, value: str = "") -> None:
    if not name or "=" in name or "\0" in name + value:
        raise ValueError(f"{name!r} cannot be an environment variable: no '=' in its name, no NUL in its value")
    if name in _OURS:
        key = _OURS[name]
        raise ValueError(f"{name} is set for each task by tfdist: {f'use {key!r} instead' if key else 'remove it'}")


_OURS = {
    "TF_CONFIG": "",
    "TFDIST_STRATEGY": "",
    "TFDIST_RUN_DIR": "run_dir",
    "TFDIST_SECRETS": "secrets",
    "TFDIST_GPUS": "gpus",
    "CUDA_VISIBLE_DEVICES": "gpus",
    "TFDIST_GPU_MEMORY": "gpu_memory",
    "TF_FORCE_GPU_ALLOW_GROWTH": "gpu_memory",
    "TF_NUM_INTRAOP_THREADS": "threads",
    "TF_NUM_INTEROP_THREADS": "threads",
}
"""Variables that the plan decides, each with the key that it follows from: what tasks get and what is shown is one."""


RestartPolicy = Literal["replace", "job", "never"]


class RestartSpec(SpecModel):
    """What is done when a task of a role is lost."""

    policy: RestartPolicy
    """`replace`: it is started again alone while the training goes on. `job`: all tasks are, from the last checkpoint,
    but for no evaluator. `never`: the job ends, or goes on without its evaluator."""
    max: Annotated[int, Field(ge=0)] | None = None
    """How often one task may bring that about; by default only `--max-restarts` bounds it."""


def default_restart(strategy: Strategy, role: Role) -> RestartSpec:
    """What is done about a lost task where the cluster file says nothing."""
    return RestartSpec(policy="replace" if is_replaceable(strategy, role) else "job")


class RoleSpec(SpecModel):
    """The tasks of one role."""

    replicas: Annotated[int, Field(ge=0, le=10_000)] | None = None
    """How many tasks; by default 1, or one for each of `hosts`."""
    hosts: Annotated[list[AddressField], Field(min_length=1)] | None = None
    """An address per task, `host:port`; port 2222 when none is named. Without it the tasks run on this machine."""
    cpus: Annotated[int, Field(ge=1)] | None = None
    """Cores that one task computes on; by default the machine's cores are shared out."""
    memory: SizeField | None = None
    """Memory that one task may need, `4GiB`: a limit where the launcher has limits. On this machine nothing is limited;
    tasks that ask for more than it has, all together, are warned of."""
    gpus: GpusField | None = None
    """GPUs that one task sees: a number of its own, `[0, 2]` for those very ones, or `all`. None for a ps or a data
    worker; by default those that train share out the machine's."""
    gpu_memory: GpuMemoryField | None = None
    """Memory that one task takes of each GPU it sees: `grow`, as much as it comes to need; `0.5`, a fraction;
    `4096MiB`. By default TensorFlow takes nearly all of it at the start."""
    threads: ThreadsSpec | None = None
    """TensorFlow's threads in one task."""
    env: Annotated[dict[str, str], AfterValidator(_check_env)] = {}
    """Environment variables of the tasks."""
    secrets: Annotated[dict[str, SecretSpec], AfterValidator(_check_secrets)] = {}
    """Variables with values that are not to be seen, each `{env: NAME}` or `{file: path}`."""
    restart: RestartSpec | None = None
    """What is done when a task is lost; by default `{policy: replace}` for an evaluator and a worker of parameter
    servers, and `{policy: job}` for every other task."""

    @model_validator(mode="after")
    def _one_address_per_task(self) -> RoleSpec:
        if self.hosts is not None and self.replicas not in (None, len(self.hosts)):
            message = f"replicas is {self.replicas} but hosts names {len(self.hosts)}: give one of the two"
            raise Inconsistent([(("replicas",), message)])
        return self

    @model_validator(mode="after")
    def _a_variable_has_one_value(self) -> RoleSpec:
        twice = [
            (("secrets", name), f"{name} stands in env too: remove one") for name in self.secrets if name in self.env
        ]
        if twice:
            raise Inconsistent(twice)
        return self

    @property
    def count(self) -> int:
        """The number of tasks."""
        if self.hosts is not None:
            return len(self.hosts)
        return 1 if self.replicas is None else self.replicas


class _ByRole:
    """Access to the specifications of roles, by name."""

    def of(self, role: Role) -> RoleSpec | None:
        """What the file says of `role`; None when the cluster has none."""
        spec: RoleSpec | None = getattr(self, role)
        return spec

    def count(self, role: Role) -> int:
        """The number of tasks of `role`; 0 when the cluster has none."""
        spec = self.of(role)
        return 0 if spec is None else spec.count


if TYPE_CHECKING:

    class Roles(_ByRole, SpecModel):
        """Which roles the cluster has: an attribute for each row of `ROLES`."""

        def __init__(self, **roles: RoleSpec | None) -> None: ...
        def __getattr__(self, role: str) -> Any: ...

else:
    _FIELDS: dict[str, Any] = {
        role: (RoleSpec | None, Field(None, description=traits.description)) for role, traits in ROLES.items()
    }
    Roles = create_model(
        "Roles", __base__=(_ByRole, SpecModel), __doc__="Which roles the cluster has.", __module__=__name__, **_FIELDS
    )

_LAUNCHER_HELP = (
    "What starts the tasks: " + "; ".join(f"`{name}`, {row.summary}" for name, row in LAUNCHERS.items()) + "."
)


class Cluster(SpecModel):
    """A cluster: its roles, its strategy, and the recipe it trains.

    Raises:
        ValueError: the roles don't fit the strategy, or two tasks share an address.
    """

    name: Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_check_name)] = "cluster"
    """A name for run directories and tables; by default the file's name."""
    strategy: Strategy
    """How tasks train together: `parameter_server`, `multi_worker_mirrored`, `mirrored` (one process, all its GPUs)
    or `single` (one process)."""
    launcher: LauncherName = Field(default="local", description=_LAUNCHER_HELP)
    network: Literal["private", "host"] | None = None
    """The tasks' network on this machine: `private`, one of their own, where nobody else reaches them and they reach
    no other host; `host`, this machine's. By default `private` for a recipe, where it is possible, and `host` for a
    program after `--` and for tasks with other addresses than loopback ones."""
    roles: Roles
    """The tasks, by role."""
    hosts: Annotated[list[HostName | HostSpec], Field(min_length=1)] | None = None
    """The machines that the ssh launcher puts the tasks without an address on: a name, or a map."""
    ssh: SshSpec | None = None
    """How the ssh launcher reaches them, and what it copies there."""
    slurm: SlurmSpec | None = None
    """How `launcher: slurm` submits the tasks."""
    compose: Compose | None = None
    """What `launcher: compose` runs the tasks in."""
    kubernetes: Kubernetes | None = None
    """What `launcher: kubernetes` makes the tasks' pods of."""
    recipe: PathField | None = None
    """The recipe to train, a path relative to this file."""
    run_dir: PathField | None = None
    """The folder that run directories are made in, relative to this file; by default `runs` in the current folder."""

    @model_validator(mode="after")
    def _is_a_cluster(self) -> Cluster:
        problems = [*_role_problems(self), *_address_problems(self), *_host_problems(self)]
        if problems:
            raise Inconsistent(problems)
        return self

    @property
    def launcher_traits(self) -> LauncherTraits:
        """What is known of the launcher without importing it."""
        return LAUNCHERS[self.launcher]

    @property
    def over_ssh(self) -> SshSpec:
        """What the file says of ssh, or what holds without a word."""
        return self.ssh or SshSpec()

    @property
    def machines(self) -> tuple[HostSpec, ...]:
        """The `hosts`, each with what holds for all of them filled in."""
        given = (HostSpec(address=host) if isinstance(host, str) else host for host in self.hosts or ())
        return tuple(self._filled_in(host) for host in given)

    def machine(self, name: str) -> HostSpec:
        """The host that goes by a name in an address; one that `hosts` does not list has nothing of its own."""
        found = (host for host in self.machines if name in (host.address, host.reachable_as))
        return next(found, None) or self._filled_in(HostSpec(address=name))

    def _filled_in(self, host: HostSpec) -> HostSpec:
        ssh = self.over_ssh
        return host.model_copy(update={"user": host.user or ssh.user, "python": host.python or ssh.python})

    @property
    def tasks(self) -> tuple[TaskId, ...]:
        """Every task: chief, workers, ps, evaluator, data dispatcher, data workers."""
        return tuple(TaskId(role, index) for role in ROLES for index in range(self.roles.count(role)))

    def task(self, text: str) -> TaskId:
        """The task that a user names, `worker:1`.

        Raises:
            UsageError: it is no task's name, or the cluster has no such task.
        """
        hint = f"its tasks are {', '.join(map(str, self.tasks))}"
        try:
            task = TaskId.parse(text)
        except ValueError as error:
            raise UsageError(str(error), hint=hint) from None
        if task not in self.tasks:
            raise UsageError(f"the cluster {self.name!r} has no task {task}", hint=hint)
        return task

    def role(self, task: TaskId) -> RoleSpec:
        """What the file says of the task's role."""
        spec = self.roles.of(task.role)
        if spec is None:
            raise KeyError(str(task))
        return spec

    def restart(self, role: Role) -> RestartSpec:
        """Returns what is done when a task of the role is lost, the default where the file says nothing."""
        spec = self.roles.of(role)
        return (spec and spec.restart) or default_restart(self.strategy, role)

    def address(self, task: TaskId) -> Address:
        """The task's address as written, or a free port of this machine."""
        hosts = self.role(task).hosts
        return Address(LOOPBACK, 0) if hosts is None else hosts[task.index]


def _role_problems(cluster: Cluster) -> Iterator[Found]:
    for role, traits in ROLES.items():
        count = cluster.roles.count(role)
        if traits.singleton and count > 1:
            yield ("roles", role), f"a cluster has at most one {role}, not {count}"
    yield from _helper_problems(cluster.roles)
    yield from _restart_problems(cluster)
    yield from _strategy_problems(cluster)
    for role, traits in ROLES.items():
        spec = cluster.roles.of(role)
        if spec and spec.gpus and not traits.sees_gpus:
            yield ("roles", role, "gpus"), f"a {role} sees no GPU: remove gpus"
    yield from _thread_problems(cluster)


def _strategy_problems(cluster: Cluster) -> Iterator[Found]:
    """Roles that the strategy lacks, or has no use for."""
    strategy, traits = cluster.strategy, STRATEGIES[cluster.strategy]
    for role, purpose in traits.required.items():
        if not cluster.roles.count(role):
            yield ("roles", role), f"{strategy} needs a {role} to {purpose}: {_how_to_add(cluster.roles, role)}"
    counts = {role: count for role in ROLES if (count := cluster.roles.count(role))}
    for role in counts:
        if ROLES[role].holds_variables and not traits.coordinated:
            fix = "remove ps, or use 'strategy: parameter_server'"
            yield ("roles", role), f"{strategy} has no parameter servers: {fix}"
    training = sum(count for role, count in counts.items() if ROLES[role].trains)
    if traits.one_process and training != 1:
        many = f"{training} in chief and worker together" if training else "none"
        yield ("strategy",), f"{strategy} trains in one process, a chief: roles has {many}"


def _how_to_add(roles: Roles, role: Role) -> str:
    return f"write '{role}: {{}}' in roles" if roles.of(role) is None else "it has 0 replicas"


def _thread_problems(cluster: Cluster) -> Iterator[Found]:
    """A server's only thread, blocked in a receive, could not send what the other side waits for."""
    for role, traits in ROLES.items():
        spec = cluster.roles.of(role)
        runs_tensorflow = traits.in_tf_cluster and serves(cluster.strategy, role)
        if runs_tensorflow and spec and spec.threads and spec.threads.inter == 1:
            yield (
                ("roles", role, "threads", "inter"),
                f"a {role} with one inter-op thread waits for itself for ever: give it 2 or more, or remove the key",
            )


def _helper_problems(roles: Roles) -> Iterator[Found]:
    """Roles that are of no use without another."""
    for role, traits in ROLES.items():
        other = next((other for other in ROLES if other == traits.needs), None)
        if other and roles.count(role) and not roles.count(other):
            yield ("roles", role), f"a {role} does nothing without a {other}: {_how_to_add(roles, other)}"


def _restart_problems(cluster: Cluster) -> Iterator[Found]:
    for role, traits in ROLES.items():
        spec = cluster.roles.of(role)
        policy = spec and spec.restart and spec.restart.policy
        place = ("roles", role, "restart", "policy")
        if policy == "replace" and not is_replaceable(cluster.strategy, role):
            lost = "its variables are lost with it" if traits.holds_variables else "the others cannot go on without it"
            yield place, f"a {role} of {cluster.strategy} cannot be replaced alone, {lost}: use 'job' or 'never'"
        if policy == "job" and traits.optional:
            yield place, f"an {role} is no reason to start all tasks again: use 'replace' or 'never'"


def _address_problems(cluster: Cluster) -> Iterator[Found]:
    given = {task: cluster.address(task) for task in cluster.tasks if task.traits.listens}
    named = {task: address for task, address in given.items() if address.port}
    sharers: dict[Address, list[TaskId]] = {}
    for task, address in named.items():
        sharers.setdefault(address, []).append(task)
    for address, tasks in sharers.items():
        if len(tasks) > 1:
            message = f"{tasks[0]} and {tasks[1]} have the same address {address}"
            yield ("roles", tasks[-1].role, "hosts"), message
    outside = [(task, address) for task, address in named.items() if not address.is_loopback]
    if outside and cluster.network == "private":
        task, address = outside[0]
        yield ("network",), f"a private network has only loopback addresses, and {task} has {address}: use 'host'"
    elsewhere = [address for address in named.values() if not address.is_loopback]
    for role in (
        dict.fromkeys(task.role for task in given if task not in named) if elsewhere and not cluster.hosts else ()
    ):
        yield (
            ("roles", role),
            f"{elsewhere[0]} is another machine, which cannot reach tasks without an address: give {role} its hosts",
        )


def _host_problems(cluster: Cluster) -> Iterator[Found]:
    names = [host.address for host in cluster.machines]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield ("hosts",), f"{name} is listed more than once: give it slots"
