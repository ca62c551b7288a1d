"""Maps paths of this machine to paths on a host, and translates tasks and files accordingly."""

from __future__ import annotations

import hashlib
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.ssh.files import common_folder, write_whole
from tfdist_cli.plan.plan import CLUSTER_FILE, RECIPE_FILE, Plan, PlannedTask
from tfdist_cli.spec.loading.dump import dump
from tfdist_cli.spec.sections.cluster import Cluster

HOME = "~"
ID_FILE = "hosts_id"
"""A file in the run directory here: the id that names the run's directory on the hosts, below the run's name."""
UNKNOWN_ID = "ID"
"""The placeholder of the id until the run is started."""


@dataclass(frozen=True)
class PathMap:
    """Folders here, and the corresponding folders on a host.

    Args:
        pairs: (here, there); the first pair whose folder contains a path applies.
        start: the working directory of programs on the host.
    """

    pairs: tuple[tuple[Path, PurePosixPath], ...] = ()
    start: str = HOME

    def there(self, text: str) -> str:
        """Returns the path on the host. Text that is not a path in one of the folders is returned unchanged."""
        path = Path(text)
        if path.is_absolute():
            for here, there in self.pairs:
                if path == here or here in path.parents:
                    return str(there / path.relative_to(here))
        return text

    def at_home(self, home: str) -> PathMap:
        """Returns the map with `~` replaced by the host's home folder."""
        pairs = tuple((here, PurePosixPath(_expanded(str(there), home))) for here, there in self.pairs)
        return PathMap(pairs, _expanded(self.start, home))


def _expanded(path: str, home: str) -> str:
    return home + path[1:] if path == HOME or path.startswith(f"{HOME}/") else path


@dataclass(frozen=True)
class Copies:
    """The files that are copied to the hosts.

    Args:
        roots: files and folders here.
        to: the folder there that corresponds to the common folder of the roots.
    """

    roots: tuple[Path, ...]
    to: str

    @property
    def origin(self) -> str:
        """The name under which the folder on a host is reserved: this machine and the first root; others may change."""
        return f"{socket.gethostname()}:{self.roots[0]}"

    @classmethod
    def of(cls, cluster: Cluster, recipe: Path | None) -> Copies | None:
        """Returns the copies that the cluster file asks for; None if the hosts share this machine's files.

        The default is the recipe's folder, or the current folder for a user's program.

        Args:
            cluster: the cluster.
            recipe: the recipe's file; None for a user's program.
        """
        ssh = cluster.over_ssh
        if ssh.shared:
            return None
        roots = tuple(ssh.sync or [recipe.parent if recipe else Path.cwd()])
        return cls(roots, ssh.to or f"{HOME}/.tfdist/sync/{_folder_name(cluster, roots)}")

    def paths(self, run_dir: Path, runs: str | None) -> PathMap:
        """Returns the map of all folders to a host, with `~` for its home.

        Two runs may have the same name: in two folders here, on two machines, or one after the other. Therefore the
        path of a run's directory there contains the run's id.

        Args:
            run_dir: the run directory here.
            runs: the folder of run directories there, if the user names one.
        """
        base, cwd = common_folder(self.roots), Path.cwd()
        pairs = tuple((root, PurePosixPath(self.to) / root.relative_to(base)) for root in self.roots)
        inside = any(cwd == root or root in cwd.parents for root in self.roots)
        first = pairs[0][1] if self.roots[0].is_dir() else pairs[0][1].parent
        start = PathMap(pairs).there(str(cwd)) if inside else str(first)
        there = PurePosixPath(runs or f"{HOME}/.tfdist/runs") / run_dir.name / (_known_id(run_dir) or UNKNOWN_ID)
        return PathMap(((run_dir, there), *pairs), start)


def give_id(run_dir: Path) -> None:
    """Writes the run's id, unless the run has one from an earlier launch.

    Raises:
        UsageError: the file cannot be written.
    """
    if _known_id(run_dir):
        return
    try:
        write_whole(run_dir / ID_FILE, f"{secrets.token_hex(4)}\n".encode())
    except OSError as error:
        raise UsageError(
            f"the run directory {run_dir} cannot be written: {error.strerror}",
            code="run-dir-not-writable",
            hint="name another with --run-dir",
        ) from error


def _known_id(run_dir: Path) -> str:
    """Returns the run's id; empty when it has none."""
    with suppress(FileNotFoundError):
        return (run_dir / ID_FILE).read_text(encoding="utf-8").strip()
    return ""


def paths_of(plan: Plan, copies: Copies | None) -> PathMap:
    """Returns the map of a plan's folders to its hosts, with `~` for their homes."""
    return copies.paths(plan.run_dir, plan.cluster.over_ssh.run_dir) if copies else PathMap((), str(Path.cwd()))


def _folder_name(cluster: Cluster, roots: Sequence[Path]) -> str:
    """Returns a name unique to the cluster, this machine and the roots: two projects may use one cluster name."""
    origin = "\0".join((socket.gethostname(), *map(str, roots)))
    return f"{cluster.name}-{hashlib.sha256(origin.encode(errors='surrogateescape')).hexdigest()[:8]}"


def task_at(planned: PlannedTask, paths: PathMap, python: str) -> dict[str, Any]:
    """Returns a task with the paths of a host, in plain JSON types.

    Args:
        planned: the task with the paths of this machine.
        paths: the map to the host's paths.
        python: the host's Python.
    """
    argv = [python if word == sys.executable else paths.there(word) for word in planned.argv]
    env = {name: paths.there(value) for name, value in planned.env.items()}
    return {**planned.as_json(), "argv": argv, "env": env}


def files_at(plan: Plan, paths: PathMap) -> dict[str, str]:
    """Returns the cluster file and the recipe with the paths of a host, by file name."""
    cluster = plan.cluster.model_copy(update={"recipe": Path(RECIPE_FILE) if plan.recipe else None})
    files = {CLUSTER_FILE: dump(cluster)}
    if plan.recipe:
        recipe = plan.recipe
        if recipe.module_dir is not None:
            recipe = recipe.model_copy(update={"module_dir": Path(paths.there(str(recipe.module_dir)))})
        if recipe.checkpoint:
            there = {key: Path(paths.there(str(path))) for key, path in recipe.checkpoint.paths.items()}
            recipe = recipe.model_copy(update={"checkpoint": recipe.checkpoint.model_copy(update=there)})
        files[RECIPE_FILE] = dump(recipe)
    return files
