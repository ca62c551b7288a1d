"""Addresses + task → the `TF_CONFIG` that TensorFlow reads.

The evaluator stands in no other task's `cluster`: `ParameterServerStrategy` would wait for it for ever. Its own
`TF_CONFIG` names it beside the others. So it would be with the tasks of tf.data's service: they have a key of their
own, `data_service`, which TensorFlow does not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tfdist_cli.spec.address import Address
from tfdist_cli.spec.roles import CLUSTER_KEY, ROLES
from tfdist_cli.spec.task_id import TaskId


def tf_config(addresses: Mapping[TaskId, Address], task: TaskId) -> dict[str, Any]:
    """The value of `TF_CONFIG` for one task.

    Args:
        addresses: every task of the cluster and its address.
        task: the task it is for.

    Returns:
        `{"cluster": {role: ["host:port", ...]}, "task": {"type": role, "index": n}}`, and `data_service`, written like
        `cluster`, where there is one.

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
    """`tf_config` as the text that goes into the environment."""
    return json.dumps(tf_config(addresses, task), separators=(",", ":"))
