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
from tfdist_cli.spec.roles import CLUSTER_KEY, ROLES
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
    config: dict[str, Any] = {CLUSTER_KEY: {}, "task": {"type": task.role, "index": task.index}}
    order = [*ROLES]
    for other in sorted(addresses, key=lambda other: (order.index(other.role), other.index)):
        key = other.traits.tf_config_key or (CLUSTER_KEY if other.role == task.role else None)
        if key is not None:
            config.setdefault(key, {}).setdefault(other.role, []).append(str(addresses[other]))
    return config


def tf_config_json(addresses: Mapping[TaskId, Address], task: TaskId) -> str:
    """Returns `tf_config` as the text of the environment variable."""
    return json.dumps(tf_config(addresses, task), separators=(",", ":"))
