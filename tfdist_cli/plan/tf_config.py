"""Makes the `TF_CONFIG` of a task, which TensorFlow reads.

The `cluster` of other tasks does not list the evaluator: `ParameterServerStrategy` would wait for it without end. Only
its own `TF_CONFIG` lists it. For the same reason the tasks of tf.data's service are listed under a key that TensorFlow
does not read, `data_service`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tfdist_cli.spec.address import Address
from tfdist_cli.spec.roles import CLUSTER_KEY, ROLES, Role
from tfdist_cli.spec.task_id import TaskId


def tf_config(addresses: Mapping[TaskId, Address], task: TaskId) -> dict[str, Any]:
    """Returns the value of `TF_CONFIG` for one task.

    Args:
        addresses: the address of every task.
        task: the task.

    Returns:
        `{"cluster": {role: ["host:port", ...]}, "task": {"type": role, "index": n}}`, and `data_service` in the form of
        `cluster` if the cluster has a data service.

    Raises:
        KeyError: the cluster has no such task.
    """
    if task not in addresses:
        raise KeyError(str(task))
    return {CLUSTER_KEY: {}, "task": _own(task)} | _served(addresses, task.role)


def tf_config_json(addresses: Mapping[TaskId, Address], task: TaskId) -> str:
    """Returns `tf_config` as the text of the environment variable."""
    return TfConfigs(addresses).text(task)


class TfConfigs:
    """The texts of `tf_config` for the tasks of a cluster. What those of a role have in common is written once.

    Args:
        addresses: the address of every task.
    """

    def __init__(self, addresses: Mapping[TaskId, Address]) -> None:
        self._addresses = addresses
        self._common: dict[Role, dict[str, str]] = {}

    def text(self, task: TaskId) -> str:
        """Returns the text for one task.

        Raises:
            KeyError: the cluster has no such task.
        """
        if task not in self._addresses:
            raise KeyError(str(task))
        if task.role not in self._common:
            served = _served(self._addresses, task.role)
            self._common[task.role] = {key: _json(roles) for key, roles in served.items()}
        parts = {CLUSTER_KEY: "{}", "task": _json(_own(task))} | self._common[task.role]
        return "{" + ",".join(f'"{key}":{text}' for key, text in parts.items()) + "}"


def _own(task: TaskId) -> dict[str, Any]:
    return {"type": task.role, "index": task.index}


def _served(addresses: Mapping[TaskId, Address], role: Role) -> dict[str, dict[str, list[str]]]:
    """Returns the addresses that tasks of a role know, by key of `TF_CONFIG` and role."""
    served: dict[str, dict[str, list[str]]] = {}
    order = [*ROLES]
    for other in sorted(addresses, key=lambda other: (order.index(other.role), other.index)):
        key = other.traits.tf_config_key or (CLUSTER_KEY if other.role == role else None)
        if key is not None:
            served.setdefault(key, {}).setdefault(other.role, []).append(str(addresses[other]))
    return served


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
