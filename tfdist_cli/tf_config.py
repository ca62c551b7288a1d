"""Addresses + task → the `TF_CONFIG` that TensorFlow reads.

The evaluator stands in no other task's `cluster`: `ParameterServerStrategy` would wait for it for ever. Its own
`TF_CONFIG` names it beside the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tfdist_cli.spec.address import Address
from tfdist_cli.spec.cluster import SERVING_ROLES
from tfdist_cli.spec.task_id import TaskId


def tf_config(addresses: Mapping[TaskId, Address], task: TaskId) -> dict[str, Any]:
    """The value of `TF_CONFIG` for one task.

    Args:
        addresses: every task of the cluster and its address.
        task: the task it is for.

    Returns:
        `{"cluster": {role: ["host:port", ...]}, "task": {"type": role, "index": n}}`.

    Raises:
        KeyError: the cluster has no such task.
    """
    if task not in addresses:
        raise KeyError(str(task))
    roles = (*SERVING_ROLES, "evaluator") if task.role == "evaluator" else SERVING_ROLES
    cluster: dict[str, list[str]] = {role: [] for role in roles}
    for other in sorted(addresses, key=lambda other: other.index):
        if other.role in cluster:
            cluster[other.role].append(str(addresses[other]))
    named = {role: hosts for role, hosts in cluster.items() if hosts}
    return {"cluster": named, "task": {"type": task.role, "index": task.index}}


def tf_config_json(addresses: Mapping[TaskId, Address], task: TaskId) -> str:
    """`tf_config` as the text that goes into the environment."""
    return json.dumps(tf_config(addresses, task), separators=(",", ":"))
