"""What is done about a lost task of a job, whose tasks cannot be started one by one."""

from __future__ import annotations

from tfdist_cli.spec.sections.cluster import Cluster, RestartSpec, default_restart
from tfdist_cli.spec.task_id import ROLES, Role


def job_restarts(cluster: Cluster) -> dict[Role, RestartSpec]:
    """The rules of the roles: the job starts again where a task would; without an evaluator the training goes on."""
    return {role: _rule(cluster, role) for role in ROLES if cluster.roles.count(role)}


def _rule(cluster: Cluster, role: Role) -> RestartSpec:
    spec = cluster.roles.of(role)
    rule = (spec and spec.restart) or default_restart(cluster.strategy, role)
    if rule.policy != "replace":
        return rule
    return rule.model_copy(update={"policy": "never" if role == "evaluator" else "job"})
