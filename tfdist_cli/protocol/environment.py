"""Reads a process's cluster from its environment: `TF_CONFIG`, and the `TFDIST_` variables that are set."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args

from tfdist_cli.errors import UsageError
from tfdist_cli.protocol.phases import BUILD_FIRST, WATCH
from tfdist_cli.protocol.run_files import parse_object
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.path_scheme import refuse_scheme
from tfdist_cli.spec.roles import CLUSTER_KEY, DATA_KEY, ROLES
from tfdist_cli.spec.sections.resources import GPU_MEMORY, GPUS, Size
from tfdist_cli.spec.strategies import STRATEGIES, Communication, Strategy, StrategyTraits, infer_strategy, serves
from tfdist_cli.spec.task_id import TaskId

STRATEGY = "TFDIST_STRATEGY"
COMMUNICATION = "TFDIST_COMMUNICATION"
RUN_DIR = "TFDIST_RUN_DIR"
RUN_URL = "TFDIST_RUN_URL"
"""The address of the run in a storage service. The chief uploads its run directory there: no launcher does."""
UPLOADER = "TFDIST_UPLOADER_PID"
"""The process id of a chief's parent that uploads its run directory."""
START_TIMEOUT = "TFDIST_START_TIMEOUT"
JOIN_ADDRESS = "TFDIST_JOIN_ADDRESS"
"""Where the chief takes workers that join a running training, and those that leave it."""
MAX_WORKERS = "TFDIST_MAX_WORKERS"
MAX_DATA_WORKERS = "TFDIST_MAX_DATA_WORKERS"
LEAVE_CODE = "TFDIST_LEAVE_CODE"
"""The exit code of a task that has left a running training on SIGTERM: 0 unless its scheduler would not replace it."""
DEFAULT_START_TIMEOUT = 120.0


_Choice = TypeVar("_Choice", bound=str)
SINGLE_TASK = TaskId("chief")
"""The task of a process without a cluster."""


def run_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The run's directory, where a program or a recipe's callbacks write; the current folder if there is no run."""
    return Path(environ.get(RUN_DIR) or Path.cwd())


@dataclass(frozen=True)
class Environment:
    """This process's task, and its cluster.

    Args:
        strategy: how the tasks train together.
        task: the task of this process.
        addresses: every task's address; empty if there is no cluster.
        run_dir: the run's directory, if there is one.
        start_timeout: seconds to wait until the other tasks are up.
        gpus: how many GPUs this process must have at least.
        gpu_memory: the share of each GPU's memory for this process; None leaves that to TensorFlow.
        join_address: where the chief takes workers that join and leave; None if it takes none.
        max_workers: the most workers that it takes; 0 if it takes none.
        max_data_workers: the most data workers that there may be; 0 if there will not be more than at the start.
        leave_code: the exit code when this task has left the training.
        communication: how mirrored workers sum their gradients.
        phases: whether to time each phase of a step, for `tfdist bench`.
        builds_first: whether a training begins with the functions of the long run, for `tfdist bench`.
    """

    strategy: Strategy = "single"
    task: TaskId = SINGLE_TASK
    addresses: Mapping[TaskId, Address] = field(default_factory=dict)
    run_dir: Path | None = None
    start_timeout: float = DEFAULT_START_TIMEOUT
    join_address: Address | None = None
    max_workers: int = 0
    max_data_workers: int = 0
    leave_code: int = 0
    phases: bool = False
    builds_first: bool = False
    gpus: int = 0
    gpu_memory: float | Size | None = None
    communication: Communication = "auto"

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Environment:
        """Reads the environment. Without `TF_CONFIG` there is no cluster.

        Raises:
            UsageError: a variable has an invalid value.
        """
        addresses, task = _tf_config(environ.get("TF_CONFIG", ""))
        run_dir = environ.get(RUN_DIR)
        refuse_scheme(run_dir or "")
        return cls(
            strategy=_choice(STRATEGY, environ.get(STRATEGY), tuple(STRATEGIES))
            or infer_strategy(task.role for task in addresses),
            task=task,
            addresses=addresses,
            run_dir=Path(run_dir) if run_dir else None,
            start_timeout=_seconds(environ.get(START_TIMEOUT)),
            join_address=_join_address(environ.get(JOIN_ADDRESS)),
            max_workers=_count(MAX_WORKERS, environ.get(MAX_WORKERS), "a number of workers"),
            max_data_workers=_count(MAX_DATA_WORKERS, environ.get(MAX_DATA_WORKERS), "a number of data workers"),
            leave_code=_count(LEAVE_CODE, environ.get(LEAVE_CODE), "an exit code"),
            phases=environ.get(WATCH) == "1",
            builds_first=environ.get(BUILD_FIRST) == "1",
            gpus=_gpus(environ.get(GPUS)),
            gpu_memory=_gpu_memory(environ.get(GPU_MEMORY)),
            communication=_choice(COMMUNICATION, environ.get(COMMUNICATION), get_args(Communication)) or "auto",
        )

    @property
    def members(self) -> tuple[TaskId, ...]:
        """The tasks that compute gradients, in TensorFlow's order: the chief, then the workers."""
        return tuple(task for task in self.addresses if task.traits.trains) or (self.task,)

    @property
    def chief(self) -> TaskId:
        """The task that reports and saves: the chief, or worker 0 if there is none."""
        return self.members[0]

    @property
    def is_chief(self) -> bool:
        """Whether this process reports and saves."""
        return self.task == self.chief and not self.task.traits.evaluates

    @property
    def serves(self) -> bool:
        """Whether this process only serves a chief: a ps, a worker of one, or a task of tf.data's service."""
        return serves(self.strategy, self.task.role)

    @property
    def data_service(self) -> Mapping[TaskId, Address]:
        """The tasks of tf.data's service, the dispatcher first; empty if there is none."""
        return {task: address for task, address in self.addresses.items() if task.traits.tf_config_key == DATA_KEY}

    @property
    def traits(self) -> StrategyTraits:
        """How the tasks train together."""
        return STRATEGIES[self.strategy]


def _tf_config(text: str) -> tuple[dict[TaskId, Address], TaskId]:
    if not text.strip():
        return {}, SINGLE_TASK
    try:
        config = parse_object(text)
        listed, place = {key: config[key] for key in _KEYS if key in config or key == CLUSTER_KEY}, config["task"]
        _check_keys(listed)
        addresses = _addresses({role: hosts for roles in listed.values() for role, hosts in roles.items()})
        task = TaskId.parse(f"{place['type']}:{place['index']}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(
            f"TF_CONFIG is invalid: {reason}",
            code="invalid-tf-config",
            hint='write it as `tfdist tf-config` does: {"cluster": {"worker": ["host:port"]}, "task": '
            '{"type": "worker", "index": 0}}',
        ) from error
    if task not in addresses and task.traits.listens:
        raise UsageError(
            f"the task in TF_CONFIG is {task}, which its cluster does not have",
            code="invalid-tf-config",
            hint="use a type and an index that the cluster lists",
        )
    return addresses, task


_KEYS = tuple(dict.fromkeys(traits.tf_config_key for traits in ROLES.values() if traits.tf_config_key))
"""The keys of `TF_CONFIG` that list tasks."""


def _check_keys(listed: Mapping[str, Mapping[str, Any]]) -> None:
    for role, traits in ROLES.items():
        if traits.auxiliary and role in listed[CLUSTER_KEY]:
            key = traits.tf_config_key
            raise ValueError(f"TensorFlow would wait for {role!r} in 'cluster': put it into {key!r}")
    for key, roles in listed.items():
        known = [role for role, traits in ROLES.items() if traits.tf_config_key == key]
        for name in set(roles) - set(known):
            if key != CLUSTER_KEY:
                raise ValueError(f"{name!r} is not a role in {key!r}, which has {' and '.join(known)}")


def _addresses(cluster: Mapping[str, list[str]]) -> dict[TaskId, Address]:
    found: dict[TaskId, Address] = {}
    order: list[str] = [*ROLES, *cluster]
    for role in sorted(cluster, key=order.index):
        if not isinstance(cluster[role], list):
            raise TypeError(f"{role!r} is {cluster[role]!r}, not a list of addresses")
        for index, text in enumerate(cluster[role]):
            task, address = TaskId.parse(f"{role}:{index}"), Address.parse(text)
            if address in found.values() and task.traits.listens:
                raise ValueError(f"{address} is the address of two tasks, {task} one of them")
            found[task] = address
    return found


def _choice(name: str, text: str | None, known: tuple[_Choice, ...]) -> _Choice | None:
    """One of several values; None if the variable is not set."""
    for choice in known:
        if text == choice:
            return choice
    if text:
        raise UsageError(
            f"{name} is {text!r}",
            code="invalid-environment-variable",
            hint=f"set it to one of {', '.join(known)}, or remove it",
        )
    return None


def _gpus(text: str | None) -> int:
    """The minimal number of GPUs; `all` means at least one."""
    return 1 if text == "all" else _count(GPUS, text, "a number of GPUs, or to 'all'")


def _count(name: str, text: str | None, wanted: str) -> int:
    """A number from 0 on; 0 if the variable is not set."""
    try:
        number = int(text or 0)
    except ValueError:
        number = -1
    if number < 0:
        raise UsageError(f"{name} is {text!r}", code="invalid-environment-variable", hint=f"set it to {wanted}")
    return number


def _join_address(text: str | None) -> Address | None:
    try:
        return Address.parse(text) if text else None
    except ValueError as error:
        raise UsageError(
            f"{JOIN_ADDRESS} is invalid: {error}",
            code="invalid-environment-variable",
            hint="set it to host:port of the chief's machine",
        ) from error


def _gpu_memory(text: str | None) -> float | Size | None:
    if not text:
        return None
    try:
        return Size.parse(text) if text[-1].isalpha() else _fraction(float(text))
    except ValueError:
        raise UsageError(
            f"{GPU_MEMORY} is {text!r}",
            code="invalid-environment-variable",
            hint="set it to a fraction such as 0.5, or to an amount such as 4096MiB",
        ) from None


def _fraction(number: float) -> float:
    if not 0 < number <= 1:
        raise ValueError(number)
    return number


def _seconds(text: str | None) -> float:
    try:
        seconds = float(text) if text else DEFAULT_START_TIMEOUT
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(
            f"{START_TIMEOUT} is {text!r}",
            code="invalid-environment-variable",
            hint="set it to a number of seconds above 0",
        )
    return seconds
