"""The directory of a run: what was asked for, what happened, and what came of it."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.run.documents import to_json
from tfdist_cli.launch.run.logs import ERROR_FILE
from tfdist_cli.plan.plan import CLUSTER_FILE, RECIPE_FILE, Plan
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.loading.dump import dump
from tfdist_cli.spec.roles import ROLES, Role
from tfdist_cli.spec.sections.cluster import Cluster, Roles, RoleSpec
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.task_id import TaskId

PLAN_FILE = "plan.json"
EVENTS_FILE = "events.jsonl"
RESULT_FILE = "result.json"
LOCK_FILE = "launcher.lock"
CHECKPOINTS = "checkpoints"
LATEST = "latest"
_ATTEMPT = re.compile(r"attempt_([0-9]+)")


@dataclass(frozen=True)
class RunDir:
    """A run's directory, which this launcher has for itself.

    Args:
        path: the directory, absolute.
        attempt: which start of the run this launch begins with, from 1.
    """

    path: Path
    attempt: int

    def attempt_folder(self, number: int = 1) -> Path:
        """Where the logs of this launch's first, second, … attempt are, a folder for each task."""
        return self.path / f"attempt_{self.attempt - 1 + number}"

    @property
    def events(self) -> Path:
        """What happened, a line for each transition."""
        return self.path / EVENTS_FILE

    def resolve(
        self, cluster: Cluster, recipe: Recipe | None, addresses: Mapping[TaskId, Address]
    ) -> tuple[Cluster, Recipe | None]:
        """The cluster and the recipe as this run has them: nothing is left for those who read them to choose."""
        given = {role: _with_hosts(cluster, role, addresses) for role in ROLES}
        update = {"roles": Roles(**given), "recipe": self.path / RECIPE_FILE if recipe else None}
        cluster = cluster.model_copy(update=update)
        if recipe and recipe.checkpoint and recipe.checkpoint.dir is None:
            checkpoint = recipe.checkpoint.model_copy(update={"dir": self.path / CHECKPOINTS})
            recipe = recipe.model_copy(update={"checkpoint": checkpoint})
        return cluster, recipe

    def save(self, plan: Plan) -> None:
        """Writes the plan, its cluster and its recipe."""
        with _told(self.path):
            self._write_json(PLAN_FILE, plan.as_json())
            relative = plan.cluster.model_copy(update={"recipe": Path(RECIPE_FILE) if plan.recipe else None})
            self._write(CLUSTER_FILE, dump(relative))
            if plan.recipe:
                self._write(RECIPE_FILE, dump(plan.recipe))

    def save_result(self, result: Mapping[str, Any]) -> None:
        """Writes what came of the run."""
        self._write_json(RESULT_FILE, {**result, "run_dir": str(self.path), "attempt": self.attempt})

    def save_error(self, folder: Path, error: Mapping[str, Any]) -> None:
        """Writes why a task failed, into its folder, unless the task has done so itself."""
        path = folder / ERROR_FILE
        if not path.exists():
            self._write_json(str(path.relative_to(self.path)), error)

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        self._write(name, to_json(value, indent=2) + "\n")

    def _write(self, name: str, text: str) -> None:
        """Writes a file whole or, on a full disk, not at all: what an earlier launch has written stays."""
        path = self.path / name
        new = path.with_name(f".{path.name}.new")
        try:
            new.write_text(text, encoding="utf-8")
            new.replace(path)
        except OSError:
            with suppress(OSError):
                new.unlink()
            raise


@contextmanager
def open_run_dir(
    chosen: Path | None,
    parent: Path,
    name: str,
    now: datetime,
    check: Callable[[Path], None] = lambda _: None,
) -> Iterator[RunDir]:
    """Makes a run's directory, or goes on in the one of an earlier run, and keeps other launchers out of it.

    Args:
        chosen: the directory to use; None makes a new one in `parent`.
        parent: the folder of runs, whose `latest` points to the one of them that was opened last.
        name: the cluster's name, which a new directory's name begins with.
        now: the time, which it ends with.
        check: refuses a directory that something else than a launcher still uses. It is called before the directory is
            changed: the tasks of a job end when they find a later attempt there.

    Raises:
        UsageError: it cannot be made, it holds something else, or another launcher runs in it.
    """
    with _told(chosen or parent):
        path = _followed(chosen or _make_new(parent, f"{name}-{now:%Y%m%d-%H%M%S}"))
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_ours(path)
        if not any(path.iterdir()):
            path.chmod(0o700)  # made by hand, for this run; one that holds a run stays as its owner has left it
        lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with _told(path):
            _lock(lock, path)
        check(path)
        with _told(path):
            attempt = 1 + max(_attempts(path), default=0)
            (path / f"attempt_{attempt}").mkdir()
        if path.parent.resolve() == parent.resolve():
            _link_latest(parent, path)
        yield RunDir(path, attempt)
    finally:
        os.close(lock)


def _with_hosts(cluster: Cluster, role: Role, addresses: Mapping[TaskId, Address]) -> RoleSpec | None:
    spec = cluster.roles.of(role)
    hosts = [address for task, address in addresses.items() if task.role == role]
    if spec is None or not hosts:
        return None
    if not all(address.port for address in hosts):
        return spec  # they are found when the tasks start
    return spec.model_copy(update={"hosts": hosts, "replicas": None})


def _make_new(parent: Path, stem: str, number: int = 1) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    path = parent / (stem if number == 1 else f"{stem}-{number}")
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return _make_new(parent, stem, number + 1)
    return path


def _followed(path: Path) -> Path:
    """What a link such as `latest` points to now: soon it may point to another run.

    The folders above stay as they are written, since another host may know them by no other name.
    """
    with suppress(FileNotFoundError):
        path.stat()  # links in a circle are an error
    while path.is_symlink():
        path = path.parent / path.readlink()
    return path.absolute()


def _check_ours(path: Path) -> None:
    """Refuses a directory with other things in it: logs and checkpoints of a run don't belong between them.

    A named pipe in the place of one of its files would be waited for.
    """
    for each in path.iterdir():
        if each.exists() and not (each.is_file() or each.is_dir()):
            raise UsageError(f"{each} is neither a file nor a folder", hint="remove it, or name another --run-dir")
    found = sorted(each.name for each in path.iterdir() if each.name != LOCK_FILE and not _ATTEMPT.fullmatch(each.name))
    if found and PLAN_FILE not in found:
        raise UsageError(
            f"{path} is not a run's directory: it holds {found[0]} and no {PLAN_FILE}",
            hint="name a new directory with --run-dir, or the one of an earlier run to go on there",
        )


def _attempts(path: Path) -> Iterator[int]:
    for each in path.iterdir():
        found = _ATTEMPT.fullmatch(each.name)
        if found:
            yield int(found[1])


def _lock(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            return  # a file system without locks keeps nobody out
        pid = os.pread(lock, 32, 0).decode(errors="replace").strip()
        raise UsageError(
            f"another launch runs in {path}: pid {pid or 'unknown'}", hint="wait for it, or name another --run-dir"
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def _link_latest(parent: Path, path: Path) -> None:
    """Points `latest` at the run that was launched last; a file system without links does without."""
    new = parent / f".{LATEST}.{os.getpid()}"
    with suppress(OSError):
        new.symlink_to(path.name)
        new.replace(parent / LATEST)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turns an error of the file system into one that says what to do."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        hint = "name another with --run-dir" if error.errno != errno.ENOSPC else "make room, or name another --run-dir"
        raise UsageError(f"the run directory cannot be used: {where}: {error.strerror}", hint=hint) from error
