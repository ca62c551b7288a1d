"""A role in cluster.yaml: how many tasks it has, where they run, and what each of them gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, create_model, model_validator

from tfdist_cli.errors import InvalidValue
from tfdist_cli.spec.roles import ROLES, Role
from tfdist_cli.spec.sections.model import AddressField, Inconsistent, KeyProblem, SpecModel
from tfdist_cli.spec.sections.resources import GpuMemoryField, GpusField, SizeField, ThreadsSpec
from tfdist_cli.spec.sections.secret import SecretSpec
from tfdist_cli.spec.strategies import Strategy, is_replaceable

_SET_BY_TFDIST = {
    "TF_CONFIG": "",
    "TFDIST_STRATEGY": "",
    "TFDIST_COMMUNICATION": "communication",
    "TFDIST_RUN_DIR": "run_dir",
    "TFDIST_JOIN_ADDRESS": "",
    "TFDIST_MAX_WORKERS": "max",
    "TFDIST_MAX_DATA_WORKERS": "max",
    "TFDIST_SECRETS": "secrets",
    "TFDIST_GPUS": "gpus",
    "CUDA_VISIBLE_DEVICES": "gpus",
    "TFDIST_GPU_MEMORY": "gpu_memory",
    "TF_FORCE_GPU_ALLOW_GROWTH": "gpu_memory",
    "TF_NUM_INTRAOP_THREADS": "threads",
    "TF_NUM_INTEROP_THREADS": "threads",
}
"""Environment variables that the plan sets for each task, with the key of the file that sets them, if there is one.

A cluster file cannot set them in `env`: the task would then differ from the plan that `tfdist plan` prints.
"""


def _check_env(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        _check_variable(name, value)
    return env


def _check_secrets(secrets: dict[str, SecretSpec]) -> dict[str, SecretSpec]:
    for name in secrets:
        _check_variable(name)
        if "," in name:
            raise InvalidValue(f"{name!r} cannot be the name of a secret: remove the ','", code="invalid-variable-name")
    return secrets


def _check_variable(name: str, value: str = "") -> None:
    if not name or "=" in name or "\0" in name + value:
        message = f"{name!r} cannot be an environment variable: no '=' in its name, and no NUL in its value"
        raise InvalidValue(message, code="invalid-variable-name")
    if name in _SET_BY_TFDIST:
        key = _SET_BY_TFDIST[name]
        fix = f"use {key!r} instead" if key else "remove it"
        raise InvalidValue(f"tfdist sets {name} for each task: {fix}", code="reserved-variable")


RestartPolicy = Literal["replace", "job", "never"]
MOST_TASKS = 10_000
"""Tasks of one role at most."""


class RestartSpec(SpecModel):
    """What happens when a task of the role fails."""

    policy: RestartPolicy
    """`replace`: only this task is started again, and the training continues meanwhile. `job`: all tasks are started
    again, from the last checkpoint. `never`: the job ends; a failed evaluator leaves the training running."""
    max: Annotated[int, Field(ge=0)] | None = None
    """The most restarts that one task may cause. By default only `--max-restarts` limits them."""


def default_restart(strategy: Strategy, role: Role) -> RestartSpec:
    """What happens when a task fails whose role has no `restart` in the cluster file."""
    return RestartSpec(policy="replace" if is_replaceable(strategy, role) else "job")


class RoleSpec(SpecModel):
    """The tasks of one role."""

    replicas: Annotated[int, Field(ge=0, le=MOST_TASKS)] | None = None
    """The number of tasks. By default 1, or the number of `hosts`."""
    max: Annotated[int, Field(ge=1, le=MOST_TASKS)] | None = None
    """The most tasks that the role may have while a training runs. Up to this number, tasks join the training and leave
    it while the others continue: by `tfdist scale`, or by `tfdist role` on another machine. By default the number of
    tasks at the launch. It is for workers of parameter servers, data workers and evaluators; the other roles get
    another number of tasks through a checkpoint."""
    hosts: Annotated[list[AddressField], Field(min_length=1)] | None = None
    """The address of each task, `host` or `host:port`; the default port is 2222. With `max`, further tasks may have
    addresses, too. Without `hosts`, the launcher chooses the addresses: with `launcher: local`, free ports of this
    machine."""
    cpus: Annotated[int, Field(ge=1)] | None = None
    """Cores for each task. By default the tasks that compute share the cores of their machine equally."""
    memory: SizeField | None = None
    """Memory for each task, such as `4GiB`. Launchers with containers or a scheduler enforce it as a limit. On this
    machine there is no limit, but a warning if the tasks ask for more than the machine has."""
    gpus: GpusField | None = None
    """GPUs that each task sees: a number, a list of IDs such as `[0, 2]`, or `all`. By default the tasks that compute
    gradients share the GPUs of their machine equally. A ps and the tasks of the data service see no GPU."""
    gpu_memory: GpuMemoryField | None = None
    """Memory that each task allocates on each of its GPUs: `grow` (as needed), a fraction such as `0.5`, or an amount
    such as `4096MiB`. By default TensorFlow allocates nearly all of it at the start."""
    threads: ThreadsSpec | None = None
    """The thread pools of TensorFlow in each task."""
    env: Annotated[dict[str, str], AfterValidator(_check_env)] = {}
    """Environment variables of the tasks."""
    secrets: Annotated[dict[str, SecretSpec], AfterValidator(_check_secrets)] = {}
    """Environment variables with secret values. Each is `{env: NAME}`, a variable of the launcher's environment, or
    `{file: path}`. Logs and run directories never contain the values."""
    restart: RestartSpec | None = None
    """What happens when a task fails. By default `{policy: replace}` for an evaluator and for a worker of parameter
    servers, and `{policy: job}` for every other task."""

    @model_validator(mode="after")
    def _one_address_per_task(self) -> RoleSpec:
        if self.hosts is None or self.replicas in (None, len(self.hosts)):
            return self
        if self.max is not None and self.replicas < len(self.hosts):
            return self
        fix = "remove one of the keys" if self.max is None else "list at least one address for each task"
        message = f"replicas is {self.replicas}, but hosts lists {len(self.hosts)}: {fix}"
        raise Inconsistent([KeyProblem(("replicas",), message, code="replicas-differ-from-hosts")])

    @model_validator(mode="after")
    def _not_more_than_max(self) -> RoleSpec:
        if self.max is None:
            return self
        if self.count > self.max:
            message = f"the role has {self.count} tasks, and max is {self.max}: raise max, or have fewer tasks"
            raise Inconsistent([KeyProblem(("max",), message, code="max-below-replicas")])
        if self.hosts is not None and len(self.hosts) > self.max:
            message = f"max is {self.max}, but hosts lists {len(self.hosts)}: raise max, or remove addresses"
            raise Inconsistent([KeyProblem(("max",), message, code="max-below-hosts")])
        return self

    @model_validator(mode="after")
    def _a_variable_has_one_value(self) -> RoleSpec:
        problems = [
            KeyProblem(("secrets", name), f"{name} is in env, too: remove one of them", code="duplicate-variable")
            for name in self.secrets
            if name in self.env
        ]
        if problems:
            raise Inconsistent(problems)
        return self

    @property
    def count(self) -> int:
        """The number of tasks."""
        if self.replicas is not None:
            return self.replicas
        return 1 if self.hosts is None else len(self.hosts)

    @property
    def capacity(self) -> int:
        """The most tasks that it may have while a training runs."""
        if self.hosts is not None:
            return len(self.hosts)
        return max(self.count, self.max or 0)


class _ByRole:
    """Access to the roles of a cluster by name."""

    def of(self, role: Role) -> RoleSpec | None:
        """Returns the role's part of the file; None when the cluster has no such role."""
        spec: RoleSpec | None = getattr(self, role)
        return spec

    def count(self, role: Role) -> int:
        """Returns the number of tasks of `role`; 0 when the cluster has none."""
        spec = self.of(role)
        return 0 if spec is None else spec.count

    def capacity(self, role: Role) -> int:
        """Returns the most tasks of `role` while a training runs; 0 when the cluster has no such role."""
        spec = self.of(role)
        return 0 if spec is None else spec.capacity


if TYPE_CHECKING:

    class Roles(_ByRole, SpecModel):
        """The roles of the cluster: one field for each row of `ROLES`."""

        def __init__(self, **roles: RoleSpec | None) -> None: ...
        def __getattr__(self, role: str) -> Any: ...

else:
    _FIELDS: dict[str, Any] = {
        role: (RoleSpec | None, Field(None, description=traits.description)) for role, traits in ROLES.items()
    }
    Roles = create_model(
        "Roles", __base__=(_ByRole, SpecModel), __doc__="The roles of the cluster.", __module__=__name__, **_FIELDS
    )
