"""A plan → its containers as plain values, and these in the words of a compose file and of `podman run`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.object_names import label
from tfdist_cli.launch.run.documents import to_yaml
from tfdist_cli.plan.plan import RECIPE_FILE, Plan, PlannedTask
from tfdist_cli.spec.loading.dump import dump
from tfdist_cli.spec.sections.compose import Compose
from tfdist_cli.spec.task_id import TaskId

RECIPE_PATH = "/run/tfdist/recipe.yaml"
"""Where a container has the recipe."""
GRACE = 30
"""Seconds that a container has to end when its engine tells it to; a launch has its own, --shutdown-timeout."""
RUN_LABEL = "tfdist.run"
"""The label of all containers of a run, by which they are found when their launcher is gone."""


@dataclass(frozen=True)
class Mount:
    """A folder or a file of this machine that a container sees."""

    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class Service:
    """The container of one task.

    Args:
        name: its name in the network.
        image: what it is made of.
        argv: its command.
        env: all that is set in it, but secrets.
        secrets: the variables of its secrets, and those that compose finds their values in.
        user: whom its processes run as, `uid:gid`.
        same_users: whether user ids have to be mapped so that they are inside what they are outside.
        mounts: what it sees of this machine; the recipe is not among them.
        recipe: whether it has the run's recipe, at `RECIPE_PATH`.
        cpus: cores that it may use; None for all.
        memory: bytes that it may use; None for all.
        devices: GPUs by their names in the Container Device Interface.
    """

    name: str
    image: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    secrets: Mapping[str, str]
    user: str
    same_users: bool
    mounts: tuple[Mount, ...]
    recipe: bool
    cpus: int | None
    memory: int | None
    devices: tuple[str, ...]


def service_name(task: TaskId) -> str:
    """The name of a task in the containers' network: `data-worker-0`."""
    return task.slug.replace("_", "-")


def project_name(run_dir: Path) -> str:
    """The name of a run among all that the engine knows: two folders of the same name have different ones."""
    return label(f"tfdist-{run_dir.name}-{label(str(run_dir))[-6:]}", 40)


def service_of(plan: Plan, planned: PlannedTask, engine: str) -> Service:
    """One task's container.

    Raises:
        UsageError: a folder that it needs cannot be mounted.
    """
    role, compose = plan.cluster.role(planned.task), plan.cluster.compose or Compose()
    return Service(
        name=service_name(planned.task),
        image=compose.image,
        argv=_role_argv(planned.task) if plan.recipe else planned.argv,
        env=planned.env,
        secrets={name: spec.env or name for name, spec in planned.secrets.items()},
        user=f"{os.getuid()}:{os.getgid()}",
        same_users=engine == "podman" and os.getuid() != 0,
        mounts=tuple(_mounts(plan, compose)),
        recipe=plan.recipe is not None,
        cpus=role.cpus,
        memory=role.memory.bytes if role.memory else None,
        devices=tuple(f"nvidia.com/gpu={gpu}" for gpu in planned.resources.gpus),
    )


def _role_argv(task: TaskId) -> tuple[str, ...]:
    return ("tfdist", "role", "--task", str(task), "--recipe", RECIPE_PATH, "--planned")


def _mounts(plan: Plan, compose: Compose) -> Iterator[Mount]:
    """The run's directory, what the recipe needs, and the user's own; the former have the paths that they have here."""
    recipe = plan.recipe
    own = {str(plan.run_dir): False}
    if recipe and recipe.module_dir:
        own.setdefault(str(recipe.module_dir), True)
    saved = recipe and recipe.checkpoint and recipe.checkpoint.dir
    if saved and not saved.is_relative_to(plan.run_dir):
        own[str(saved)] = False
    for path, read_only in own.items():
        if ":" in path or not path.isprintable():
            raise UsageError(
                f"{path!r} cannot be mounted in a container: no ':' and no control characters",
                hint="rename the folder, or name another with --run-dir",
            )
        yield Mount(path, path, read_only)
    for volume in compose.volumes:
        source, target, *mode = volume.split(":")
        yield Mount(source, target, bool(mode))


def run_argv(service: Service, run_dir: Path, project: str, start: str, own: Iterable[str]) -> list[str]:
    """The arguments with which an engine runs a container, and stays until it has ended.

    Args:
        service: the container.
        run_dir: the run's directory, which has the recipe.
        project: the run's name, which is that of its network, too.
        start: the container's name; one that is started again needs a new one.
        own: names of variables that the engine's client has in its environment: everybody can read its command line.
    """
    mounts = [*service.mounts, *([Mount(str(run_dir / RECIPE_FILE), RECIPE_PATH, True)] if service.recipe else ())]
    program, *arguments = service.argv
    options = ["--init", "--log-driver", "none", "--name", start, "--label", f"{RUN_LABEL}={project}"]
    options += ["--network", project, "--network-alias", service.name, "--hostname", service.name]
    options += ["--user", service.user, *(["--userns", "keep-id"] if service.same_users else ())]
    options += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--security-opt", "label=disable"]
    options += ["--stop-timeout", str(GRACE)]
    for mount in mounts:
        options += ["--volume", f"{mount.source}:{mount.target}{':ro' if mount.read_only else ''}"]
    for variable in (*(f"{name}={value}" for name, value in service.env.items()), *own):
        options += ["--env", variable]
    options += [] if service.cpus is None else ["--cpus", str(service.cpus)]
    options += [] if service.memory is None else ["--memory", f"{service.memory}b"]
    for device in service.devices:
        options += ["--device", device]
    return ["run", *options, "--entrypoint", program, service.image, *arguments]


def compose_file(plan: Plan, engine: str) -> str:
    """The whole plan as a file that `docker compose` runs."""
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
        filled_in = {name: f"${{{variable}:?is not set}}" for name, variable in service.secrets.items()}
        content["services"][service.name]["environment"] |= filled_in
    return to_yaml([content])


def _as_compose(service: Service) -> dict[str, Any]:
    program, *arguments = service.argv
    words: dict[str, Any] = {
        "image": service.image,
        "hostname": service.name,
        "init": True,
        "restart": "no",
        "stop_grace_period": f"{GRACE}s",
        "user": service.user,
        "userns_mode": "keep-id" if service.same_users else None,
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
    return {key: value for key, value in words.items() if value is not None}


def _escaped(value: Any) -> Any:
    """Saves the dollars of values, which compose would fill in from its environment."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("$", "$$") if isinstance(value, str) else value
