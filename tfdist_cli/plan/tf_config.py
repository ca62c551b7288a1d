"""Addresses + task → the `TF_CONFIG` that TensorFlow reads.

The evaluator stands in no other task's `cluster`: `ParameterServerStrategy` would wait for it for ever. Its own
`TF_CONFIG` names it beside the others. So it would be with the tasks of tf.data's service: they have a key of their
own, `data_service`, which TensorFlow does not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import DATA_KEY, SERVING_ROLES
from tfdist_cli.spec.task_id import DATA_ROLES, Role, TaskId


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
    roles = (*SERVING_ROLES, "evaluator") if task.role == "evaluator" else SERVING_ROLES
    config: dict[str, Any] = {"cluster": _hosts(addresses, roles), "task": {"type": task.role, "index": task.index}}
    served = _hosts(addresses, DATA_ROLES)
    return config | {DATA_KEY: served} if served else config


def _hosts(addresses: Mapping[TaskId, Address], roles: Sequence[Role]) -> dict[str, list[str]]:
    hosts: dict[str, list[str]] = {role: [] for role in roles}
    for task in sorted(addresses, key=lambda task: task.index):
        if task.role in hosts:
            hosts[task.role].append(str(addresses[task]))
    return {role: found for role, found in hosts.items() if found}


def tf_config_json(addresses: Mapping[TaskId, Address], task: TaskId) -> str:
    """`tf_config` as the text that goes into the environment."""
    return json.dumps(tf_config(addresses, task), separators=(",", ":"))
