"""The restart rules of a cluster's roles that its launcher supports."""

from __future__ import annotations

from tfdist_cli.spec.roles import ROLES, Role
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.sections.role_spec import RestartSpec

MAX_RESTARTS = 3
"""Default limit of restarts of a recipe that has checkpoints."""


def default_max_restarts(recipe: Recipe | None) -> int:
    """Returns how often a job is restarted by default: without checkpoints a restart would lose all training."""
    return MAX_RESTARTS if recipe and recipe.checkpoint else 0


def restart_rules(cluster: Cluster) -> dict[Role, RestartSpec]:
    """Returns the rules of the roles whose rule is not the default.

    Where the launcher cannot start one task again, the job starts again in its place. Without an evaluator the training
    continues.
    """
    if cluster.launcher_traits.restarts_tasks:
        return {role: spec.restart for role in ROLES if (spec := cluster.roles.of(role)) and spec.restart}
    return {role: _job_rule(role, cluster.restart(role)) for role in ROLES if cluster.roles.count(role)}


def _job_rule(role: Role, rule: RestartSpec) -> RestartSpec:
    if rule.policy != "replace":
        return rule
    return rule.model_copy(update={"policy": "never" if ROLES[role].optional else "job"})
