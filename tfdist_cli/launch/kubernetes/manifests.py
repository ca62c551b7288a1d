"""Renders a plan as Kubernetes objects: a JobSet, a TFJob, plain Jobs or pods, and the objects that these need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tfdist_cli.errors import ExitCode, UsageError
from tfdist_cli.launch.kubernetes.pods import (
    CONTAINER,
    FILES,
    INDEX,
    RUNS,
    Manifest,
    as_env,
    environment,
    indexed_env,
    job_name,
    labels,
    metadata,
    operators_env,
    pod_template,
    role_argv,
    role_name,
    settings,
    without_none,
)
from tfdist_cli.launch.object_names import label
from tfdist_cli.launch.restart_rules import MAX_RESTARTS, default_max_restarts
from tfdist_cli.plan.plan import RECIPE_FILE, Plan
from tfdist_cli.spec.address import DEFAULT_PORT
from tfdist_cli.spec.loading.dump import dump
from tfdist_cli.spec.roles import ROLES, Role
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.kubernetes import Kind, Kubernetes
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.strategies import STRATEGIES, decides
from tfdist_cli.spec.task_id import TaskId

CONFIG_MAP_BYTES = 2**20
"""The size limit of a ConfigMap."""
KILLED = 137
"""The exit code after SIGKILL. The most likely cause is lack of memory, and a restart would not help."""
TF_ROLES: Mapping[Role, str] = {"chief": "Chief", "worker": "Worker", "ps": "PS", "evaluator": "Evaluator"}
"""The roles that a TFJob supports, with their names there."""


def host_name(cluster: Cluster, task: TaskId) -> str:
    """Returns the DNS name of a task's pod for pods in the same namespace."""
    section = cluster.kubernetes or Kubernetes()
    job, role = label(cluster.name, 35), role_name(task.role)
    if section.kind == "jobset":
        return f"{job}-{role}-0-{task.index}.{job}"
    if section.kind == "tfjob":
        return f"{job}-{role}-{task.index}"
    return f"{role}-{task.index}.{job}"


def manifests(plan: Plan) -> list[Manifest]:
    """Returns all objects of a plan, in the order in which they are created.

    Raises:
        UsageError: Kubernetes, or this kind of job, does not support a setting of the cluster or the recipe.
    """
    return [*shared_objects(plan), *_JOBS[settings(plan).kind](plan)]


def shared_objects(plan: Plan) -> list[Manifest]:
    """Returns the objects that all pods of a plan use.

    Raises:
        UsageError: see `manifests`.
    """
    _check(plan)
    service = [_service(plan)] if settings(plan).kind in ("plain", "pods") else []
    return [_network_policy(plan), _config_map(plan), *service]


def pod(plan: Plan, task: TaskId, name: str, env: Mapping[str, str]) -> Manifest:
    """Returns a task's pod, which Kubernetes does not restart.

    Args:
        plan: the tasks.
        task: the task.
        name: the pod's name.
        env: additional variables of this start.
    """
    template = _template(plan, task)
    [container] = template["spec"]["containers"]
    container["env"] += as_env(env)
    described = metadata(plan, name) | {"labels": template["metadata"]["labels"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": described, "spec": template["spec"]}


def _check(plan: Plan) -> None:
    section = settings(plan)
    for role in _roles(plan):
        spec = plan.cluster.roles.of(role)
        if spec and spec.secrets and section.secret is None:
            names = " ".join(f"--from-literal={name}=…" for name in spec.secrets)
            raise UsageError(
                f"roles.{role}.secrets: pods read secrets from a Secret, but kubernetes.secret is not set",
                code="kubernetes-secret-not-set",
                hint=f"`kubectl create secret generic NAME {names}`, and write 'secret: NAME' in kubernetes",
            )
        if section.kind == "jobset" and plan.cluster.restart(role).policy == "never" and ROLES[role].optional:
            raise UsageError(
                f"roles.{role}.restart: a JobSet ends when one of its jobs has failed, and cannot go on without it",
                code="role-not-supported",
                hint="use 'kind: plain' or 'kind: pods' in kubernetes, or another policy",
            )
        if section.kind == "tfjob" and role not in TF_ROLES:
            raise UsageError(
                f"roles.{role}: a TFJob does not support this role",
                code="role-not-supported",
                hint="use 'kind: jobset' or 'kind: plain' in kubernetes",
            )


def _roles(plan: Plan) -> list[Role]:
    return list(dict.fromkeys(planned.task.role for planned in plan.tasks))


def _count(plan: Plan, role: Role) -> int:
    return sum(planned.task.role == role for planned in plan.tasks)


def _network_policy(plan: Plan) -> Manifest:
    """Lets only the job's pods connect to its tasks: a client can run any TensorFlow operation in a task.

    NCCL, by which GPUs of several pods sum gradients, listens on ports of its own.
    """
    own = {"podSelector": {"matchLabels": labels(plan)}}
    ports = sorted({DEFAULT_PORT, *plan.spare_ports})
    any_port = STRATEGIES[plan.strategy].together and any(planned.resources.gpus for planned in plan.tasks)
    limit = {} if any_port else {"ports": [{"protocol": "TCP", "port": port} for port in ports]}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(plan, job_name(plan)),
        "spec": {
            **own,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [own], **limit}],
        },
    }


def _config_map(plan: Plan) -> Manifest:
    data = _recipe_files(plan, plan.recipe) if plan.recipe else {}
    size = sum(len(text.encode()) for text in data.values())
    if size > CONFIG_MAP_BYTES - 1024:
        raise UsageError(
            f"the recipe and its module have {size} bytes, but a ConfigMap has at most {CONFIG_MAP_BYTES}",
            code="recipe-too-large",
            hint="put the module in the image",
        )
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(plan, job_name(plan)), "data": data}


def _inside(plan: Plan, recipe: Recipe) -> Recipe:
    """Returns the recipe with the pods' paths: a checkpoint folder in the run directory moves with it."""
    saved = recipe.checkpoint
    if saved and isinstance(saved.dir, Path) and saved.dir.is_relative_to(plan.run_dir):
        moved = Path(RUNS / job_name(plan) / saved.dir.relative_to(plan.run_dir))
        recipe = recipe.model_copy(update={"checkpoint": saved.model_copy(update={"dir": moved})})
    return recipe.model_copy(update={"module_dir": Path(FILES)})


def _recipe_files(plan: Plan, recipe: Recipe) -> dict[str, str]:
    """Returns the recipe, and its module if that is a file beside it. Installed modules have to be in the image."""
    files = {RECIPE_FILE: dump(_inside(plan, recipe))}
    if recipe.module_dir is None:
        return files
    if (recipe.module_dir / recipe.module.partition(".")[0]).is_dir():
        raise UsageError(
            f"the recipe's module {recipe.module!r} is a package of several files, which a ConfigMap cannot contain",
            code="module-is-a-package",
            hint="install it in the image, and remove it from the recipe's folder or set its module_dir",
        )
    path = recipe.module_dir / f"{recipe.module}.py"
    if path.is_file():
        files[path.name] = path.read_text(encoding="utf-8")
    return files


def _failure_policy(*, ignore_disruptions: bool) -> Manifest:
    """Returns the policy that fails the job on exit codes that a restart cannot avoid.

    Args:
        ignore_disruptions: whether an evicted or preempted pod is replaced without counting as a failure. Otherwise it
            counts as one, also if it was killed: the first rule that matches decides.
    """
    action = "Ignore" if ignore_disruptions else "Count"
    disrupted = {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    codes = {"containerName": CONTAINER, "operator": "In", "values": [int(ExitCode.USAGE), KILLED]}
    return {"rules": [disrupted, {"action": "FailJob", "onExitCodes": codes}]}


def _deciding(plan: Plan) -> list[Role]:
    """Returns the roles whose tasks have to exit with 0 before the job is complete, the evaluator included."""
    return [role for role in _roles(plan) if decides(plan.strategy, role) or ROLES[role].outlives_training]


def _jobset(plan: Plan) -> Iterator[Manifest]:
    section = settings(plan)
    never = [role_name(role) for role in _roles(plan) if plan.cluster.restart(role).policy == "never"]
    rules = [{"name": "HopelessOrKilled", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
    rules += [{"name": "NeverAgain", "action": "FailJobSet", "targetReplicatedJobs": never}] if never else []
    yield {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(plan, job_name(plan)),
        "spec": {
            "ttlSecondsAfterFinished": section.ttl_seconds,
            "network": {"enableDNSHostnames": True, "subdomain": job_name(plan), "publishNotReadyAddresses": True},
            "successPolicy": {
                "operator": "All",
                "targetReplicatedJobs": [role_name(role) for role in _deciding(plan)],
            },
            "failurePolicy": {"maxRestarts": default_max_restarts(plan.recipe), "rules": rules},
            "replicatedJobs": [_replicated(plan, role) for role in _roles(plan)],
        },
    }


def _replicated(plan: Plan, role: Role) -> Manifest:
    count, restart = _count(plan, role), plan.cluster.restart(role)
    alone = restart.policy == "replace"
    most = MAX_RESTARTS if restart.max is None else restart.max
    template = pod_template(plan, role, role_argv(plan, role, f"$({INDEX})"), indexed_env(plan, role))
    job = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": most * count if alone else 0,
        "podFailurePolicy": _failure_policy(ignore_disruptions=alone),
        "template": template,
    }
    return {"name": role_name(role), "replicas": 1, "template": {"spec": job}}


def _tfjob(plan: Plan) -> Iterator[Manifest]:
    section = settings(plan)
    yield {
        "apiVersion": "kubeflow.org/v1",
        "kind": "TFJob",
        "metadata": metadata(plan, job_name(plan)),
        "spec": {
            "runPolicy": {
                "cleanPodPolicy": "Running",
                "ttlSecondsAfterFinished": section.ttl_seconds,
                "backoffLimit": default_max_restarts(plan.recipe),
            },
            "successPolicy": "" if STRATEGIES[plan.strategy].coordinated else "AllWorkers",
            "tfReplicaSpecs": {
                TF_ROLES[role]: {
                    "replicas": _count(plan, role),
                    # The operator restarts pods that a signal has killed, but not pods that exited with an error.
                    "restartPolicy": "Never" if plan.cluster.restart(role).policy == "never" else "ExitCode",
                    "template": pod_template(plan, role, role_argv(plan, role, None), operators_env(plan, role), None),
                }
                for role in _roles(plan)
            },
        },
    }


def _service(plan: Plan) -> Manifest:
    """Returns the service that gives each pod a DNS name, also before the pod is ready."""
    job = job_name(plan)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(plan, job),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels(plan),
            "ports": [{"name": "tensorflow", "port": DEFAULT_PORT}],
        },
    }


def _template(plan: Plan, task: TaskId) -> Manifest:
    """Returns the template of one task's pod, with its name in the job's service."""
    argv, name = role_argv(plan, task.role, str(task.index)), f"{role_name(task.role)}-{task.index}"
    env = as_env(environment(plan, task))
    return pod_template(plan, task.role, argv, env, hostname=name, subdomain=job_name(plan))


def _plain(plan: Plan) -> Iterator[Manifest]:
    for planned in plan.tasks:
        role, index = planned.task.role, planned.task.index
        restart = plan.cluster.restart(role)
        most = MAX_RESTARTS if restart.policy == "replace" else default_max_restarts(plan.recipe)
        job = {
            "ttlSecondsAfterFinished": settings(plan).ttl_seconds,
            "backoffLimit": 0 if restart.policy == "never" else most if restart.max is None else restart.max,
            "podFailurePolicy": _failure_policy(ignore_disruptions=True) if restart.policy != "never" else None,
            "template": _template(plan, planned.task),
        }
        yield {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": metadata(plan, f"{job_name(plan)}-{role_name(role)}-{index}"),
            "spec": without_none(job),
        }


def _pods(plan: Plan) -> Iterator[Manifest]:
    for planned in plan.tasks:
        yield pod(plan, planned.task, f"{job_name(plan)}-{role_name(planned.task.role)}-{planned.task.index}", {})


_JOBS: Mapping[Kind, Callable[[Plan], Iterator[Manifest]]] = {
    "jobset": _jobset,
    "tfjob": _tfjob,
    "plain": _plain,
    "pods": _pods,
}
