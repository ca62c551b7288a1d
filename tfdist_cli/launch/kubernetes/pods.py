"""Renders a task's pod: names, command, environment, volumes. All kinds of job use the same pod."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from tfdist_cli.launch.object_names import label
from tfdist_cli.plan.plan import RECIPE_FILE, Plan
from tfdist_cli.protocol.environment import LEAVE_CODE, RUN_DIR
from tfdist_cli.spec.address import DEFAULT_PORT
from tfdist_cli.spec.roles import Role
from tfdist_cli.spec.sections.kubernetes import Kubernetes
from tfdist_cli.spec.sections.role_spec import RoleSpec
from tfdist_cli.spec.task_id import TaskId

Manifest = dict[str, Any]
FILES = PurePosixPath("/tfdist/job")
"""The folder of the recipe and its module in a pod."""
RUNS = PurePosixPath("/tfdist/runs")
"""The folder of run directories in a pod; it exists in the image."""
USER = 1000
"""The user id in the image."""
CONTAINER = "tensorflow"
"""The container's name, which a TFJob's operator requires."""
GRACE = 60
"""Seconds between SIGTERM and SIGKILL: a chief saves a checkpoint."""
INDEX = "TFDIST_INDEX"
"""The variable with a pod's index within its role, where Kubernetes numbers the pods."""
_INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
LONGEST_NAME = 35
"""Characters of a job's name that leave room for suffixes: `-data-dispatcher-0-1234`, and five random characters."""


def job_name(plan: Plan) -> str:
    """Returns the name of the job and of its objects."""
    return label(plan.name, LONGEST_NAME)


def role_name(role: Role) -> str:
    """Returns a role as part of an object's name: `data-worker`."""
    return role.replace("_", "-")


def settings(plan: Plan) -> Kubernetes:
    """Returns the cluster file's `kubernetes` section, or its defaults."""
    return plan.cluster.kubernetes or Kubernetes()


def labels(plan: Plan, role: Role | None = None) -> dict[str, str]:
    """Returns the labels of a job's objects, or of a role's pods."""
    own = {"app.kubernetes.io/name": "tfdist", "app.kubernetes.io/instance": job_name(plan)}
    return own | ({"app.kubernetes.io/component": role_name(role)} if role else {})


def metadata(plan: Plan, name: str) -> Manifest:
    """Returns the metadata of an object."""
    namespace = settings(plan).namespace
    return {"name": name, **({"namespace": namespace} if namespace else {}), "labels": labels(plan)}


def role_argv(plan: Plan, role: Role, index: str | None) -> list[str]:
    """Returns the command of a role's tasks; the plan has decided their environment.

    Args:
        plan: the tasks.
        role: their role.
        index: the task's index, or a reference to the variable with it, `$(NAME)`; None where only `TF_CONFIG` has it.
    """
    argv = ["tfdist", "role", *(["--task", f"{role}:{index}"] if index else [])]
    if plan.recipe:
        return [*argv, "--recipe", str(FILES / RECIPE_FILE), "--planned"]
    return [*argv, "--planned", "--", *(literal(word) for word in plan[TaskId(role)].argv)]


def environment(plan: Plan, task: TaskId) -> dict[str, str]:
    """Returns a task's planned variables, with the run directory of the pods.

    A pod that exits with 0 is complete, and Kubernetes does not replace it. So a worker that leaves, since its node is
    drained for example, exits as if SIGTERM had ended it.
    """
    leaves = {} if settings(plan).kind == "pods" else {LEAVE_CODE: str(128 + signal.SIGTERM)}
    return {**plan[task].env, **leaves, RUN_DIR: str(RUNS / job_name(plan))}


def as_env(variables: Mapping[str, str]) -> list[Manifest]:
    """Returns variables as a container's `env`, with literal values."""
    return [{"name": name, "value": literal(value)} for name, value in variables.items()]


def indexed_env(plan: Plan, role: Role) -> list[Manifest]:
    """Returns the `env` of all tasks of a role in one template, where Kubernetes numbers the pods.

    Kubernetes expands references to variables that precede in the list. Its own variable of the index does not, so the
    list starts with a copy.
    """
    variables = environment(plan, TaskId(role))
    # These characters occur only once in the JSON: inside a string the quotation marks would be escaped.
    before, number, after = variables.pop("TF_CONFIG").partition('"index":0')
    if not number:
        raise ValueError("TF_CONFIG has no task index")
    filled_in = f'{literal(before)}"index":$({INDEX}){literal(after)}'
    own = {"name": INDEX, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX_ANNOTATION}']"}}}
    return [own, {"name": "TF_CONFIG", "value": filled_in}, *as_env(variables)]


def operators_env(plan: Plan, role: Role) -> list[Manifest]:
    """Returns the `env` of a role's tasks in a TFJob. Its operator sets `TF_CONFIG` if there are several tasks."""
    variables = environment(plan, TaskId(role))
    if len(plan.tasks) > 1:
        del variables["TF_CONFIG"]
    return as_env(variables)


def literal(text: str) -> str:
    """Escapes text so that Kubernetes expands no variables in it."""
    return text.replace("$", "$$")


def pod_template(
    plan: Plan, role: Role, argv: list[str], env: list[Manifest], restart: str | None = "Never", **more: Any
) -> Manifest:
    """Returns the template of a role's pods.

    Args:
        plan: the tasks.
        role: their role.
        argv: their command.
        env: their variables without secrets.
        restart: the pods' restartPolicy; None where the job's kind sets it.
        more: further fields of the pod.
    """
    section, spec = settings(plan), _role(plan, role)
    pod = {
        **more,
        "restartPolicy": restart,
        "terminationGracePeriodSeconds": GRACE,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "shareProcessNamespace": True,  # as process 1 a program without a handler would ignore SIGTERM
        "serviceAccountName": section.service_account,
        "imagePullSecrets": [{"name": name} for name in section.image_pull_secrets] or None,
        "nodeSelector": dict(section.node_selector) or None,
        "tolerations": [each.model_dump(exclude_none=True) for each in section.tolerations] or None,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(plan, section, spec, argv, env)],
        "volumes": [{"name": name, **source} for name, source, _, _ in _volumes(plan, section)],
    }
    return {"metadata": {"labels": labels(plan, role)}, "spec": without_none(pod)}


def without_none(fields: Mapping[str, Any]) -> Manifest:
    """Returns the fields whose values are not None."""
    return {key: value for key, value in fields.items() if value is not None}


def _role(plan: Plan, role: Role) -> RoleSpec:
    return plan.cluster.role(TaskId(role))


def _container(plan: Plan, section: Kubernetes, spec: RoleSpec, argv: list[str], env: list[Manifest]) -> Manifest:
    secrets = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": section.secret, "key": name}}} for name in spec.secrets
    ]
    return without_none(
        {
            "name": CONTAINER,
            "image": section.image,
            "imagePullPolicy": section.image_pull_policy,
            "command": argv,
            "env": [*env, *secrets],
            "ports": [{"name": "tfjob-port", "containerPort": DEFAULT_PORT}],
            "resources": _resources(spec),
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": [
                {"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})}
                for name, _, path, read_only in _volumes(plan, section)
            ],
        }
    )


def _resources(spec: RoleSpec) -> Manifest | None:
    limits: dict[str, str] = {}
    if spec.cpus is not None:
        limits["cpu"] = str(spec.cpus)
    if spec.memory is not None:
        limits["memory"] = str(spec.memory).removesuffix("B").replace(" ", "")
    if spec.gpus:
        limits["nvidia.com/gpu"] = str(spec.gpus)
    return {"requests": limits, "limits": dict(limits)} if limits else None


def _volumes(plan: Plan, section: Kubernetes) -> Iterator[tuple[str, Manifest, str, bool]]:
    """Yields each volume: its name, its source, its path, and whether it is read-only."""
    runs = {"persistentVolumeClaim": {"claimName": section.claim}} if section.claim else {"emptyDir": {}}
    yield "files", {"configMap": {"name": job_name(plan)}}, str(FILES), True
    yield "runs", runs, str(RUNS), False
    yield "tmp", {"emptyDir": {}}, "/tmp", False  # noqa: S108 the container's /tmp
    for number, volume in enumerate(section.volumes):
        claim, path, *mode = volume.split(":")
        yield f"claim-{number}", {"persistentVolumeClaim": {"claimName": claim}}, path, bool(mode)
