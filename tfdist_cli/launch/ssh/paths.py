"""Where the folders of this machine are on a host, and what that makes of a task."""

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
"""In a run's directory here: the name of its directory on hosts, below that of the run."""
UNKNOWN_ID = "ID"
"""What stands for it until the run is started."""


@dataclass(frozen=True)
class Places:
    """Folders here, and where a host has them.

    Args:
        pairs: (here, there); of two that hold a path, the first counts.
        start: the folder there that programs start in.
    """

    pairs: tuple[tuple[Path, PurePosixPath], ...] = ()
    start: str = HOME

    def there(self, text: str) -> str:
        """A path as the host has it; what is no path in one of the folders stays as it is."""
        path = Path(text)
        if path.is_absolute():
            for here, there in self.pairs:
                if path == here or here in path.parents:
                    return str(there / path.relative_to(here))
        return text

    def at_home(self, home: str) -> Places:
        """The same with the host's home folder filled in."""
        pairs = tuple((here, PurePosixPath(_expanded(str(there), home))) for here, there in self.pairs)
        return Places(pairs, _expanded(self.start, home))


def _expanded(path: str, home: str) -> str:
    return home + path[1:] if path == HOME or path.startswith(f"{HOME}/") else path


@dataclass(frozen=True)
class Copies:
    """What is copied to the hosts.

    Args:
        roots: files and folders here.
        to: the folder there that has the place of their common one here.
    """

    roots: tuple[Path, ...]
    to: str

    @property
    def origin(self) -> str:
        """Whose the folder on a host is: this machine's first root's. The other roots may change."""
        return f"{socket.gethostname()}:{self.roots[0]}"

    @classmethod
    def of(cls, cluster: Cluster, recipe: Path | None) -> Copies | None:
        """As the cluster file says, or the folder of the recipe, or else the current one; None where files are shared.

        Args:
            cluster: the cluster.
            recipe: the recipe's file; None for a program of the user's own.
        """
        ssh = cluster.over_ssh
        if ssh.shared:
            return None
        roots = tuple(ssh.sync or [recipe.parent if recipe else Path.cwd()])
        return cls(roots, ssh.to or f"{HOME}/.tfdist/sync/{_folder_name(cluster, roots)}")

    def places(self, run_dir: Path, runs: str | None) -> Places:
        """Where all folders are on a host, whose home is `~`.

        Two runs may have one name, in two folders here, on two machines, or one after the other: the path of a run's
        directory there has the run's id too.

        Args:
            run_dir: the run's directory here.
            runs: the folder of run directories there, if the user names one.
        """
        base, cwd = common_folder(self.roots), Path.cwd()
        pairs = tuple((root, PurePosixPath(self.to) / root.relative_to(base)) for root in self.roots)
        inside = any(cwd == root or root in cwd.parents for root in self.roots)
        first = pairs[0][1] if self.roots[0].is_dir() else pairs[0][1].parent
        start = Places(pairs).there(str(cwd)) if inside else str(first)
        there = PurePosixPath(runs or f"{HOME}/.tfdist/runs") / run_dir.name / (_known_id(run_dir) or UNKNOWN_ID)
        return Places(((run_dir, there), *pairs), start)


def give_id(run_dir: Path) -> None:
    """Gives a run its id, unless it has one of an earlier launch.

    Raises:
        UsageError: it cannot be kept.
    """
    if _known_id(run_dir):
        return
    try:
        write_whole(run_dir / ID_FILE, f"{secrets.token_hex(4)}\n".encode())
    except OSError as error:
        raise UsageError(
            f"the run directory {run_dir} cannot be written: {error.strerror}", hint="name another with --run-dir"
        ) from error


def _known_id(run_dir: Path) -> str:
    """The run's id; empty when it has none."""
    with suppress(FileNotFoundError):
        return (run_dir / ID_FILE).read_text(encoding="utf-8").strip()
    return ""


def places_of(plan: Plan, copies: Copies | None) -> Places:
    """Where a plan's folders are on its hosts, whose homes are `~`."""
    return copies.places(plan.run_dir, plan.cluster.over_ssh.run_dir) if copies else Places((), str(Path.cwd()))


def _folder_name(cluster: Cluster, roots: Sequence[Path]) -> str:
    """A folder for this cluster of these folders of this machine; two projects may use one name."""
    origin = "\0".join((socket.gethostname(), *map(str, roots)))
    return f"{cluster.name}-{hashlib.sha256(origin.encode(errors='surrogateescape')).hexdigest()[:8]}"


def task_at(planned: PlannedTask, places: Places, python: str) -> dict[str, Any]:
    """A task as a host is to run it, in plain JSON types.

    Args:
        planned: the task as this machine would run it.
        places: where folders are on the host.
        python: the host's Python.
    """
    argv = [python if word == sys.executable else places.there(word) for word in planned.argv]
    env = {name: places.there(value) for name, value in planned.env.items()}
    return {**planned.as_json(), "argv": argv, "env": env}


def files_at(plan: Plan, places: Places) -> dict[str, str]:
    """The cluster and the recipe as the tasks on a host are to read them, by the names of their files."""
    cluster = plan.cluster.model_copy(update={"recipe": Path(RECIPE_FILE) if plan.recipe else None})
    files = {CLUSTER_FILE: dump(cluster)}
    if plan.recipe:
        recipe = plan.recipe
        if recipe.module_dir is not None:
            recipe = recipe.model_copy(update={"module_dir": Path(places.there(str(recipe.module_dir)))})
        if recipe.checkpoint and recipe.checkpoint.dir:
            there = Path(places.there(str(recipe.checkpoint.dir)))
            checkpoint = recipe.checkpoint.model_copy(update={"dir": there})
            recipe = recipe.model_copy(update={"checkpoint": checkpoint})
        files[RECIPE_FILE] = dump(recipe)
    return files
