"""The directory of a run: its configuration, its events, its logs and its result."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.documents import to_json
from tfdist_cli.launch.run.logs import ERROR_FILE
from tfdist_cli.plan.plan import CLUSTER_FILE, RECIPE_FILE, Plan
from tfdist_cli.protocol.run_files import read_object
from tfdist_cli.protocol.task_events import read_launch
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.loading.dump import dump
from tfdist_cli.spec.path_scheme import Location, Url, checked_location
from tfdist_cli.spec.recipe_files import copy_to_run
from tfdist_cli.spec.roles import ROLES, Role
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.sections.role_spec import Roles, RoleSpec
from tfdist_cli.spec.task_id import TaskId

PLAN_FILE = "plan.json"
EVENTS_FILE = "events.jsonl"
RESULT_FILE = "result.json"
LOCK_FILE = "launcher.lock"
LEASE_FILE = "launcher.json"
"""In a storage service: which launcher writes to the run directory."""
UPLOAD_LOG_FILE = ".upload.log"
"""What went wrong while the directory was uploaded."""
SENT_FILE = ".uploaded.json"
"""The size and the time of each file that is uploaded."""
ORIGIN_FILE = "bucket.json"
"""In a local run directory: the address of the storage service to which it is uploaded."""
CHECKPOINTS = "checkpoints"
LATEST = "latest"
_ATTEMPT = re.compile(r"attempt_([0-9]+)")


@dataclass(frozen=True)
class RunDir:
    """A run's directory, locked by this launcher.

    Args:
        path: the directory, absolute.
        attempt: the run's attempt with which this launch begins, from 1.
    """

    path: Path
    attempt: int

    def attempt_folder(self, number: int = 1) -> Path:
        """The folder of this launch's first, second, … attempt, with a folder of logs for each task."""
        return self.path / f"attempt_{self.attempt - 1 + number}"

    @property
    def events(self) -> Path:
        """The file of the run's events."""
        return self.path / EVENTS_FILE

    def resolve(
        self, cluster: Cluster, recipe: Recipe | None, addresses: Mapping[TaskId, Address]
    ) -> tuple[Cluster, Recipe | None]:
        """The cluster and the recipe of this run, with all defaults replaced by the values chosen."""
        resolved = {role: _with_hosts(cluster, role, addresses) for role in ROLES}
        update = {"roles": Roles(**resolved), "recipe": self.path / RECIPE_FILE if recipe else None}
        cluster = cluster.model_copy(update=update)
        if recipe and recipe.checkpoint and recipe.checkpoint.dir is None:
            checkpoint = recipe.checkpoint.model_copy(update={"dir": self.path / CHECKPOINTS})
            recipe = recipe.model_copy(update={"checkpoint": checkpoint})
        return cluster, recipe

    def save(self, plan: Plan) -> None:
        """Writes the plan, its cluster and its recipe."""
        with _file_errors(self.path):
            self._write_json(PLAN_FILE, plan.as_json())
            relative = plan.cluster.model_copy(update={"recipe": Path(RECIPE_FILE) if plan.recipe else None})
            self._write(CLUSTER_FILE, dump(relative))
            if plan.recipe:
                self._write(RECIPE_FILE, dump(plan.recipe))
                if plan.recipe.source:
                    copy_to_run(plan.recipe.source.sha256, self.path)

    def save_result(self, result: Mapping[str, Any]) -> None:
        """Writes the result of the run."""
        self._write_json(RESULT_FILE, {**result, "run_dir": str(self.path), "attempt": self.attempt})

    def save_error(self, folder: Path, error: Mapping[str, Any]) -> None:
        """Writes a task's error to its folder, unless the task has written it itself."""
        path = folder / ERROR_FILE
        if not path.exists():
            self._write_json(str(path.relative_to(self.path)), error)

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        self._write(name, to_json(value, indent=2) + "\n")

    def _write(self, name: str, text: str) -> None:
        """Writes a file atomically: on a full disk the file of an earlier launch stays."""
        path = self.path / name
        new = path.with_name(f".{path.name}.new")
        try:
            new.write_text(text, encoding="utf-8")
            new.replace(path)
        except OSError:
            with suppress(OSError):
                new.unlink()
            raise


def short_names(runs: Sequence[str]) -> list[str]:
    """Returns names that tell runs apart: those of the directories, after their parents' where two have the same.

    Args:
        runs: the paths or addresses of the runs; one that is given twice gets the numbers of its places.
    """
    names = [run.rpartition("/")[2] for run in runs]
    names = [
        "/".join(run.split("/")[-2:]) if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)
    ]
    return [f"{name} ({index + 1})" if names.count(name) > 1 else name for index, name in enumerate(names)]


@contextmanager
def open_run_dir(
    chosen: Path | None,
    parent: Path,
    name: str,
    now: datetime,
    check: Callable[[Path], None] = lambda _: None,
) -> Iterator[RunDir]:
    """Creates a run's directory, or opens that of an earlier run, and locks it.

    Args:
        chosen: the directory to use; None creates a new one in `parent`.
        parent: the folder of runs; its link `latest` points to the run that was opened last.
        name: the cluster's name, the prefix of a new directory's name.
        now: the time, its suffix.
        check: raises an error for a directory that is still in use, although no launcher has locked it. It is called
            before the directory is changed: the tasks of a Slurm job exit when they find a later attempt there.

    Raises:
        UsageError: it cannot be created, it contains other files, or another launcher has locked it.
    """
    with _file_errors(chosen or parent):
        path = _follow_links(chosen or _make_new(parent, new_name(name, now)))
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_ours(path)
        if not any(path.iterdir()):
            path.chmod(0o700)  # the user created it for this run; that of an earlier run keeps its mode
        lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with _file_errors(path):
            _lock(lock, path)
            _check_no_manual_tasks(path)
        check(path)
        with _file_errors(path):
            attempt = 1 + max(_attempts(path), default=0)
            (path / f"attempt_{attempt}").mkdir()
        if path.parent.resolve() == parent.resolve():
            _link_latest(parent, path)
        yield RunDir(path, attempt)
    finally:
        os.close(lock)


def check_run_dir(chosen: Path | None, parent: Path, check: Callable[[Path], None] = lambda _: None) -> None:
    """Checks that `open_run_dir` can use a directory, and leaves all files as they are.

    Args:
        chosen: the directory to use; None for a new one in `parent`.
        parent: the folder of runs.
        check: raises an error for an existing directory that cannot be used.

    Raises:
        UsageError: it cannot be created, it contains other files, or tasks use it.
    """
    with _file_errors(chosen or parent):
        path = _follow_links(chosen or parent)
        if not path.exists():
            _check_creatable(path)
            return
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        if chosen is None:
            return
        _check_ours(path)
        _check_no_manual_tasks(path)
    check(path)


def _check_creatable(path: Path) -> None:
    """Checks that a directory can be created, by one beside it that is removed at once.

    Raises:
        OSError: it cannot.
    """
    above = next(each for each in path.parents if each.exists())
    try:
        Path(tempfile.mkdtemp(prefix=".tfdist-", dir=above)).rmdir()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def refuse_without_checkpoints(path: Path, recipe: Recipe | None) -> None:
    """Checks that a recipe continues the training of a run directory that has checkpoints.

    Args:
        path: the run directory.
        recipe: the recipe; None for a user's program.

    Raises:
        UsageError: the recipe keeps no checkpoints.
    """
    if recipe is not None and recipe.checkpoint is None and has_checkpoints(path):
        raise UsageError(
            f"{path} has checkpoints, and the recipe keeps none: it would train from the beginning, beside the "
            "checkpoints of another training",
            code="run-has-checkpoints",
            hint="choose another --run-dir; or, to continue that training, add 'checkpoint: {every_seconds: 60}' to "
            "the recipe",
        )


def has_checkpoints(path: Path) -> bool:
    """Whether a run directory has checkpoints."""
    return any((path / CHECKPOINTS).glob("step-*"))


def _check_no_manual_tasks(path: Path) -> None:
    """Rejects a directory in which tasks train that were started each by itself."""
    if alive := read_launch(path).alive:
        raise UsageError(
            f"{min(alive)} runs in {path}, started by hand",
            code="run-dir-in-use",
            hint="wait until it is done, end it with `tfdist stop`, or choose another --run-dir",
        )


def _with_hosts(cluster: Cluster, role: Role, addresses: Mapping[TaskId, Address]) -> RoleSpec | None:
    spec = cluster.roles.of(role)
    hosts = [address for task, address in addresses.items() if task.role == role]
    if spec is None or not hosts:
        return None
    if not all(address.port for address in hosts):
        return spec  # the ports are chosen when the tasks start
    if len(hosts) == spec.count:
        return spec.model_copy(update={"hosts": hosts, "replicas": None})
    return spec.model_copy(update={"hosts": hosts, "replicas": spec.count, "max": len(hosts)})


def chosen_location(run_dir: str | Path | None) -> Location | None:
    """Returns the path or the address that the user gives as the run directory; None if there is none.

    Raises:
        UsageError: it is empty, or an address that tfdist cannot use.
    """
    if run_dir is None:
        return None
    if not str(run_dir).strip():
        raise UsageError(
            "the run directory is empty text",
            code="empty-path",
            hint="give a path or an address with --run-dir, or omit it; is a variable in the command unset?",
        )
    return checked_location(run_dir)


def run_location(chosen: Location | None, cluster: Cluster) -> tuple[Location | None, Path]:
    """Returns where a run is stored, and the folder for it on this machine.

    Args:
        chosen: the run directory that the user names; None for a new one.
        cluster: the cluster.

    Returns:
        The address or the path, and its local folder. None and the folder of runs for a new directory there.
    """
    runs = cluster.local_runs or Path.cwd() / "runs"
    if chosen is None and isinstance(cluster.run_dir, Url):
        name = new_name(cluster.name, datetime.now().astimezone())
        chosen = cluster.run_dir / f"{name}-{secrets.token_hex(2)}"  # others may launch in the same second
    if isinstance(chosen, Path):
        with suppress(OSError, ValueError, KeyError):  # a run that was stored continues so
            return Url(read_object(chosen / ORIGIN_FILE)["url"]), chosen
    return chosen, runs if chosen is None else runs / chosen.name if isinstance(chosen, Url) else chosen


def new_run_dir(parent: Path, name: str, now: datetime) -> Path:
    """Creates the directory of a new run, for a launcher that is about to start.

    Raises:
        UsageError: it cannot be created.
    """
    with _file_errors(parent):
        return _make_new(parent, new_name(name, now)).absolute()


def new_name(name: str, now: datetime) -> str:
    """Returns the name of a new run's directory."""
    return f"{name}-{now:%Y%m%d-%H%M%S}"


def _make_new(parent: Path, stem: str, number: int = 1) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    path = parent / (stem if number == 1 else f"{stem}-{number}")
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return _make_new(parent, stem, number + 1)
    return path


def _follow_links(path: Path) -> Path:
    """The target of a link such as `latest`, which may point to another run later.

    Links in the parent folders are kept, since other hosts may not have their targets.
    """
    with suppress(FileNotFoundError):
        path.stat()  # raises an error for links in a circle
    while path.is_symlink():
        path = path.parent / path.readlink()
    return path.absolute()


def _check_ours(path: Path) -> None:
    """Raises an error for a directory with other files in it.

    A named pipe in place of one of the run's files would block the launcher.
    """
    for each in path.iterdir():
        if each.exists() and not (each.is_file() or each.is_dir()):
            raise UsageError(
                f"{each} is neither a file nor a folder",
                code="not-a-run-dir",
                hint="remove it, or choose another --run-dir",
            )
    own = (LOCK_FILE, ORIGIN_FILE, UPLOAD_LOG_FILE, SENT_FILE)  # also of a launch that ended before its plan
    found = sorted(each.name for each in path.iterdir() if each.name not in own and not _ATTEMPT.fullmatch(each.name))
    if found and PLAN_FILE not in found:
        raise UsageError(
            f"{path} is not a run's directory: it contains {found[0]} and no {PLAN_FILE}",
            code="not-a-run-dir",
            hint="choose a new directory with --run-dir, or that of an earlier run to resume it",
        )


def _attempts(path: Path) -> Iterator[int]:
    for each in path.iterdir():
        found = _ATTEMPT.fullmatch(each.name)
        if found:
            yield int(found[1])


def check_unused(path: Path) -> None:
    """Checks that no launch runs in a directory; one that does not exist has none.

    Raises:
        UsageError: another launch runs there.
    """
    with _file_errors(path):
        try:
            lock = (path / LOCK_FILE).open("r+b")
        except FileNotFoundError:
            return
        with lock:
            _take(lock.fileno(), path)  # until it is closed


def _lock(lock: int, path: Path) -> None:
    if _take(lock, path):
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def _take(lock: int, path: Path) -> bool:
    """Takes the lock; returns False if the file system has none.

    Raises:
        UsageError: another launch has it.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        pid = os.pread(lock, 32, 0).decode(errors="replace").strip()
        raise UsageError(
            f"another launch runs in {path}: pid {pid or 'unknown'}",
            code="run-dir-in-use",
            hint="wait for it, or choose another --run-dir",
        ) from None
    return True


def _link_latest(parent: Path, path: Path) -> None:
    """Points `latest` to this run, if the file system supports links."""
    new = parent / f".{LATEST}.{os.getpid()}"
    with suppress(OSError):
        new.symlink_to(path.name)
        new.replace(parent / LATEST)


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """Translates a file system error into a UsageError with a hint."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        full = error.errno == errno.ENOSPC
        raise UsageError(
            f"the run directory cannot be used: {where}: {error.strerror}",
            code="disk-full" if full else "run-directory-unusable",
            hint="free space on the disk, or choose another --run-dir" if full else "choose another --run-dir",
        ) from error
