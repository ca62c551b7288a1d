"""Renders a plan as containers: as plain values, as a compose file, and as arguments of `podman run`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.documents import to_yaml
from tfdist_cli.launch.object_names import label
from tfdist_cli.plan.plan import RECIPE_FILE, Plan, PlannedTask
from tfdist_cli.spec.loading.dump import dump
from tfdist_cli.spec.sections.compose import Compose
from tfdist_cli.spec.task_id import TaskId

RECIPE_PATH = "/run/tfdist/recipe.yaml"
"""The recipe's path in a container."""
GRACE = 30
"""Seconds between SIGTERM and SIGKILL when an engine stops a container. `launch` uses --shutdown-timeout instead."""
RUN_LABEL = "tfdist.run"
"""The label of a run's containers, by which the cleanup finds them after the launcher has exited."""


@dataclass(frozen=True)
class Mount:
    """A folder or a file of this machine that is mounted into a container."""

    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class Service:
    """The container of one task.

    Args:
        name: its host name in the network.
        image: its image.
        argv: its command.
        env: its variables without secrets.
        secrets: maps the variables of its secrets to the variables from which compose reads their values.
        user: the user of its processes, `uid:gid`.
        keep_user_ids: whether user ids inside the container must be mapped to the same ids outside.
        mounts: its mounts, without the recipe.
        recipe: whether the run's recipe is mounted at `RECIPE_PATH`.
        cpus: the most cores that it may use; None for all.
        memory: the most bytes that it may use; None for all.
        devices: its GPUs, by their names in the Container Device Interface.
    """

    name: str
    image: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    secrets: Mapping[str, str]
    user: str
    keep_user_ids: bool
    mounts: tuple[Mount, ...]
    recipe: bool
    cpus: int | None
    memory: int | None
    devices: tuple[str, ...]


def service_name(task: TaskId) -> str:
    """Returns a task's host name in the containers' network: `data-worker-0`."""
    return task.slug.replace("_", "-")


def project_name(run_dir: Path) -> str:
    """Returns a name of a run that is unique in the engine: equal folder names in two parents get different ones."""
    return label(f"tfdist-{run_dir.name}-{label(str(run_dir))[-6:]}", 40)


def service_of(plan: Plan, planned: PlannedTask, engine: str) -> Service:
    """Returns a task's container.

    Raises:
        UsageError: a folder's path cannot be mounted.
    """
    role, compose = plan.cluster.role(planned.task), plan.cluster.compose or Compose()
    return Service(
        name=service_name(planned.task),
        image=compose.image,
        argv=_role_argv(planned.task) if plan.recipe else planned.argv,
        env=planned.env,
        secrets={name: spec.env or name for name, spec in planned.secrets.items()},
        user=f"{os.getuid()}:{os.getgid()}",
        keep_user_ids=engine == "podman" and os.getuid() != 0,
        mounts=tuple(_mounts(plan, compose)),
        recipe=plan.recipe is not None,
        cpus=role.cpus,
        memory=role.memory.bytes if role.memory else None,
        devices=tuple(f"nvidia.com/gpu={gpu}" for gpu in planned.resources.gpus),
    )


def _role_argv(task: TaskId) -> tuple[str, ...]:
    return ("tfdist", "role", "--task", str(task), "--recipe", RECIPE_PATH, "--planned")


def _mounts(plan: Plan, compose: Compose) -> Iterator[Mount]:
    """Yields the run directory and the recipe's folders, under the same paths as here, and the user's volumes."""
    recipe = plan.recipe
    own = {str(plan.run_dir): False}
    if recipe and recipe.module_dir:
        own.setdefault(str(recipe.module_dir), True)
    saved = recipe.checkpoint.paths.values() if recipe and recipe.checkpoint else ()
    own |= {str(path): False for path in saved if not path.is_relative_to(plan.run_dir)}
    for path, read_only in own.items():
        if ":" in path or not path.isprintable():
            raise UsageError(
                f"{path!r} cannot be mounted in a container: a path must not contain ':' or control characters",
                code="path-not-mountable",
                hint="rename the folder, or name another with --run-dir",
            )
        yield Mount(path, path, read_only)
    for volume in compose.volumes:
        source, target, *mode = volume.split(":")
        yield Mount(source, target, bool(mode))


def run_argv(service: Service, run_dir: Path, project: str, name: str, inherited: Iterable[str]) -> list[str]:
    """Returns the arguments with which an engine runs a container in the foreground.

    Args:
        service: the container.
        run_dir: the run directory, which contains the recipe.
        project: the run's name, and the name of its network.
        name: the container's name, unique to this start.
        inherited: names of variables that the container gets from the environment of the engine's client. Their values
            must not be in the command line, which all users can read.
    """
    mounts = [*service.mounts, *([Mount(str(run_dir / RECIPE_FILE), RECIPE_PATH, True)] if service.recipe else ())]
    program, *arguments = service.argv
    options = ["--init", "--log-driver", "none", "--name", name, "--label", f"{RUN_LABEL}={project}"]
    options += ["--network", project, "--network-alias", service.name, "--hostname", service.name]
    options += ["--user", service.user, *(["--userns", "keep-id"] if service.keep_user_ids else ())]
    options += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--security-opt", "label=disable"]
    options += ["--stop-timeout", str(GRACE)]
    for mount in mounts:
        options += ["--volume", f"{mount.source}:{mount.target}{':ro' if mount.read_only else ''}"]
    for variable in (*(f"{key}={value}" for key, value in service.env.items()), *inherited):
        options += ["--env", variable]
    options += [] if service.cpus is None else ["--cpus", str(service.cpus)]
    options += [] if service.memory is None else ["--memory", f"{service.memory}b"]
    for device in service.devices:
        options += ["--device", device]
    return ["run", *options, "--entrypoint", program, service.image, *arguments]


def compose_file(plan: Plan, engine: str) -> str:
    """Returns the plan as a file for `docker compose`."""
    services = [service_of(plan, planned, engine) for planned in plan.tasks]
    content: dict[str, Any] = {
        "name": project_name(plan.run_dir),
        "services": {service.name: _as_compose(service) for service in services},
        "networks": {"default": {"internal": True}},
    }
    if plan.recipe:
        content["configs"] = {"recipe": {"content": dump(plan.recipe)}}
    content = _escaped(content)
    for service in services:
        references = {name: f"${{{variable}:?is not set}}" for name, variable in service.secrets.items()}
        content["services"][service.name]["environment"] |= references
    return to_yaml([content])


def _as_compose(service: Service) -> dict[str, Any]:
    program, *arguments = service.argv
    fields: dict[str, Any] = {
        "image": service.image,
        "hostname": service.name,
        "init": True,
        "restart": "no",
        "stop_grace_period": f"{GRACE}s",
        "user": service.user,
        "userns_mode": "keep-id" if service.keep_user_ids else None,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges", "label=disable"],
        "entrypoint": [program],
        "command": arguments,
        "environment": dict(service.env),
        "volumes": [
            {"type": "bind", "source": mount.source, "target": mount.target, "read_only": mount.read_only}
            for mount in service.mounts
        ],
        "configs": [{"source": "recipe", "target": RECIPE_PATH}] if service.recipe else None,
        "cpus": service.cpus,
        "mem_limit": None if service.memory is None else f"{service.memory}b",
        "devices": list(service.devices) or None,
    }
    return {key: value for key, value in fields.items() if value is not None}


def _escaped(value: Any) -> Any:
    """Escapes dollar signs, so that compose expands no variables."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("$", "$$") if isinstance(value, str) else value
