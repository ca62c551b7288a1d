"""A task's pod as Kubernetes takes it: the same one whatever runs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from tfdist_cli.launch.object_names import label
from tfdist_cli.plan.plan import RECIPE_FILE, Plan
from tfdist_cli.protocol.environment import RUN_DIR
from tfdist_cli.spec.address import DEFAULT_PORT
from tfdist_cli.spec.roles import Role
from tfdist_cli.spec.sections.cluster import RoleSpec
from tfdist_cli.spec.sections.kubernetes import Kubernetes
from tfdist_cli.spec.task_id import TaskId

Manifest = dict[str, Any]
FILES = PurePosixPath("/tfdist/job")
"""Where a pod has the cluster, the recipe and its module."""
RUNS = PurePosixPath("/tfdist/runs")
"""Where runs are kept; the image has this folder."""
USER = 1000
"""The image's user."""
CONTAINER = "tensorflow"
"""The container's name; a TFJob's operator looks for this one."""
GRACE = 60
"""Seconds that a pod has to end when it is told to: a chief saves a checkpoint."""
INDEX = "TFDIST_INDEX"
"""The variable with a pod's number among those of its role, where Kubernetes numbers them."""
_INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
LONGEST_NAME = 35
"""Characters of a job's name that leave room for what is added to it: `-data-dispatcher-0-1234`, and five at random."""


def job_name(plan: Plan) -> str:
    """The name of the job and of what belongs to it."""
    return label(plan.name, LONGEST_NAME)


def role_name(role: Role) -> str:
    """A role in the name of an object: `data-worker`."""
    return role.replace("_", "-")


def settings(plan: Plan) -> Kubernetes:
    """What the cluster file says of Kubernetes."""
    return plan.cluster.kubernetes or Kubernetes()


def labels(plan: Plan, role: Role | None = None) -> dict[str, str]:
    """The labels of a job's objects, and of a role's pods."""
    own = {"app.kubernetes.io/name": "tfdist", "app.kubernetes.io/instance": job_name(plan)}
    return own | ({"app.kubernetes.io/component": role_name(role)} if role else {})


def metadata(plan: Plan, name: str) -> Manifest:
    """The metadata of an object."""
    namespace = settings(plan).namespace
    return {"name": name, **({"namespace": namespace} if namespace else {}), "labels": labels(plan)}


def role_argv(plan: Plan, role: Role, index: str | None) -> list[str]:
    """The command of a role's tasks; the environment is what the plan decided.

    Args:
        plan: the tasks.
        role: which of them.
        index: the task's number, or the variable that has it, `$(NAME)`; None where `TF_CONFIG` alone says it.
    """
    argv = ["tfdist", "role", *(["--task", f"{role}:{index}"] if index else [])]
    if plan.recipe:
        return [*argv, "--recipe", str(FILES / RECIPE_FILE), "--planned"]
    return [*argv, "--planned", "--", *(literal(word) for word in plan[TaskId(role)].argv)]


def environment(plan: Plan, task: TaskId) -> dict[str, str]:
    """A task's planned variables, with the run's directory where pods have it."""
    return {**plan[task].env, RUN_DIR: str(RUNS / job_name(plan))}


def as_env(variables: Mapping[str, str]) -> list[Manifest]:
    """Variables as a container takes them, with their values as they are."""
    return [{"name": name, "value": literal(value)} for name, value in variables.items()]


def indexed_env(plan: Plan, role: Role) -> list[Manifest]:
    """The variables of all tasks of a role in one template, where Kubernetes numbers the pods.

    Kubernetes fills in a variable that stands before the one that names it, as its own of this number does not.
    """
    variables = environment(plan, TaskId(role))
    # JSON can hold these characters only here: in a text its quotation marks would have backslashes.
    before, number, after = variables.pop("TF_CONFIG").partition('"index":0')
    if not number:
        raise ValueError("TF_CONFIG does not say which task it is for")
    filled_in = f'{literal(before)}"index":$({INDEX}){literal(after)}'
    own = {"name": INDEX, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX_ANNOTATION}']"}}}
    return [own, {"name": "TF_CONFIG", "value": filled_in}, *as_env(variables)]


def operators_env(plan: Plan, role: Role) -> list[Manifest]:
    """The variables of a role's tasks where a TFJob's operator sets `TF_CONFIG`, which it does for several tasks."""
    variables = environment(plan, TaskId(role))
    if len(plan.tasks) > 1:
        del variables["TF_CONFIG"]
    return as_env(variables)


def literal(text: str) -> str:
    """Text in which Kubernetes fills in no variable."""
    return text.replace("$", "$$")


def pod_template(
    plan: Plan, role: Role, argv: list[str], env: list[Manifest], restart: str | None = "Never", **more: Any
) -> Manifest:
    """The template of a role's pods.

    Args:
        plan: the tasks.
        role: which of them.
        argv: their command.
        env: their variables, but secrets.
        restart: the pods' restartPolicy; None where something else says it.
        more: further fields of the pod.
    """
    wanted, spec = settings(plan), _role(plan, role)
    pod = {
        **more,
        "restartPolicy": restart,
        "terminationGracePeriodSeconds": GRACE,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "shareProcessNamespace": True,  # process 1 ignores SIGTERM unless it handles it, and a user's program may not
        "serviceAccountName": wanted.service_account,
        "imagePullSecrets": [{"name": name} for name in wanted.image_pull_secrets] or None,
        "nodeSelector": dict(wanted.node_selector) or None,
        "tolerations": [each.model_dump(exclude_none=True) for each in wanted.tolerations] or None,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(plan, wanted, spec, argv, env)],
        "volumes": [{"name": name, **source} for name, source, _, _ in _volumes(plan, wanted)],
    }
    return {"metadata": {"labels": labels(plan, role)}, "spec": without_none(pod)}


def without_none(fields: Mapping[str, Any]) -> Manifest:
    """The fields that say something."""
    return {key: value for key, value in fields.items() if value is not None}


def _role(plan: Plan, role: Role) -> RoleSpec:
    return plan.cluster.role(TaskId(role))


def _container(plan: Plan, wanted: Kubernetes, spec: RoleSpec, argv: list[str], env: list[Manifest]) -> Manifest:
    secrets = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": wanted.secret, "key": name}}} for name in spec.secrets
    ]
    return without_none(
        {
            "name": CONTAINER,
            "image": wanted.image,
            "imagePullPolicy": wanted.image_pull_policy,
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
                for name, _, path, read_only in _volumes(plan, wanted)
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


def _volumes(plan: Plan, wanted: Kubernetes) -> Iterator[tuple[str, Manifest, str, bool]]:
    """Each volume: its name, where it comes from, its path, and whether it is read only."""
    runs = {"persistentVolumeClaim": {"claimName": wanted.claim}} if wanted.claim else {"emptyDir": {}}
    yield "files", {"configMap": {"name": job_name(plan)}}, str(FILES), True
    yield "runs", runs, str(RUNS), False
    yield "tmp", {"emptyDir": {}}, "/tmp", False  # noqa: S108 the pod's own
    for number, volume in enumerate(wanted.volumes):
        claim, path, *mode = volume.split(":")
        yield f"claim-{number}", {"persistentVolumeClaim": {"claimName": claim}}, path, bool(mode)
