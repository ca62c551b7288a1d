"""A run whose directory is in a storage service: it is prepared here, and uploaded while it is on."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tfdist_cli.errors import ExitCode, UsageError
from tfdist_cli.launch.run.directory import CHECKPOINTS, LEASE_FILE, PLAN_FILE, SENT_FILE, UPLOAD_LOG_FILE, check_unused
from tfdist_cli.run_storage.download import download_run, origin_of, unreachable, write_origin
from tfdist_cli.run_storage.lease import ENDED, Lease, await_free
from tfdist_cli.run_storage.process import Task
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.storage import retry
from tfdist_cli.storage.remote import RemoteFolder
from tfdist_cli.storage.retry import Retry

EXPORT = "export"


def in_service(recipe: Recipe, url: Url) -> Recipe:
    """Returns the recipe with its checkpoints and exports in the run directory of a storage service."""
    changes: dict[str, Any] = {}
    if recipe.checkpoint and recipe.checkpoint.dir is None:
        changes["checkpoint"] = recipe.checkpoint.model_copy(update={"dir": url / CHECKPOINTS})
    if recipe.export and recipe.export.upload is None:
        changes["export"] = recipe.export.model_copy(update={"upload": url / EXPORT})
    return recipe.model_copy(update=changes)


def folders_of_tasks(recipe: Recipe | None, url: Url) -> tuple[str, ...]:
    """Returns the names of the folders of a run directory that the tasks upload and download themselves."""
    checkpoints = recipe is not None and recipe.checkpoint is not None and isinstance(recipe.checkpoint.dir, Url)
    exports = recipe is not None and recipe.export is not None and recipe.export.upload == url / EXPORT
    return (CHECKPOINTS,) * checkpoints + (EXPORT,) * exports


@dataclass(frozen=True)
class StoredRun:
    """A run directory in a storage service, of which this launch has the lease.

    Args:
        url: its address.
        lease: the lease.
        local: its folder on this machine.
        skipped: names of folders that the tasks upload themselves.
    """

    url: Url
    lease: Lease
    local: Path
    skipped: tuple[str, ...]

    @classmethod
    def prepare(cls, url: Url, local: Path, recipe: Recipe | None) -> StoredRun:
        """Takes the lease of a run directory, and downloads the directory unless it is here.

        Args:
            url: its address.
            local: the folder for it on this machine.
            recipe: the recipe that is trained; None for a program.

        Raises:
            UsageError: another launch uses it, here or elsewhere, it is not a run's, or the service cannot be used.
        """
        check_unused(local)
        remote, skipped = RemoteFolder(url), folders_of_tasks(recipe, url)
        try:
            sizes = remote.sizes()
            found = Lease.read(remote) if LEASE_FILE in sizes else None
            _check_run(url, sizes)
            origin = origin_of(local)
            if found and not (origin and origin[1] == found.launch):  # a launcher here would use the local folder
                await_free(remote, found)
            _bring(remote, local, PLAN_FILE in sizes, found, skipped)
            lease = Lease.new().written(remote)
        except OSError as error:
            raise unreachable(url, error) from error
        return cls(url, lease, local, skipped)

    @contextmanager
    def given_back_on_error(self) -> Iterator[None]:
        """Gives the lease back if the local run directory cannot be opened: no launch comes of it."""
        try:
            yield
        except BaseException:
            with suppress(OSError):
                self.lease.written(RemoteFolder(self.url, Retry(0)), ENDED)
                if self.local.is_dir():  # it is the newest state of the run
                    write_origin(self.local, self.url, self.lease.launch)
            raise

    @contextmanager
    def uploading(self, local: Path) -> Iterator[UploadProcess]:
        """Uploads the run directory while the context is open; an exception ends this, too.

        Args:
            local: the run directory, which exists now.
        """
        write_origin(local, self.url, self.lease.launch)
        process = UploadProcess(Task(local, self.url, self.lease, self.skipped, patience=retry.RETRY_SECONDS))
        try:
            yield process
        finally:
            process.finish(ExitCode.FAILED)


def _check_run(url: Url, names: Collection[str]) -> None:
    """Checks that a folder has nothing but a run.

    Raises:
        UsageError: it has something else.
    """
    own = (LEASE_FILE, f"{CHECKPOINTS}/", f"{EXPORT}/")
    if PLAN_FILE not in names and (other := [name for name in names if not name.startswith(own)]):
        raise UsageError(
            f"{url} is not a run's directory: it contains {other[0]} and no {PLAN_FILE}",
            code="not-a-run-dir",
            hint="choose a new address with --run-dir, or that of an earlier run to resume it",
        )


def _bring(remote: RemoteFolder, local: Path, stored: bool, last: Lease | None, skipped: Sequence[str]) -> None:
    """Makes the local folder the newest state of a run.

    Args:
        remote: the run directory in the service.
        local: its folder here.
        stored: whether the service has a run.
        last: the lease of its last launch.
        skipped: names of folders that the tasks download themselves.

    Raises:
        UsageError: the local folder belongs to another run.
    """
    origin = origin_of(local)
    if (local / PLAN_FILE).exists() and (origin is None or origin[0] != remote.url):
        raise UsageError(
            f"{local} is the directory of another run",
            code="run-dir-of-another-run",
            hint="rename it, or launch in another folder: a run in a storage service has a local folder of its name",
        )
    if not stored:
        (local / SENT_FILE).unlink(missing_ok=True)  # whatever was uploaded is not there any more
    elif origin is None or last is None or origin[1] != last.launch:
        new = local.with_name(f".{local.name}.downloading")
        shutil.rmtree(new, ignore_errors=True)
        download_run(remote, new, remote.sizes(), skipped)
        write_origin(new, remote.url, last.launch if last else "")
        with suppress(OSError):
            local.rmdir()  # it is empty
        if local.exists():
            local.rename(_unused(local))  # another machine has continued the run
        new.rename(local)


def _unused(path: Path) -> Path:
    number = 1
    while (new := path.with_name(f"{path.name}.replaced-{number}")).exists():
        number += 1
    return new


class UploadProcess:
    """The process that uploads a run directory.

    Args:
        task: what it does.
    """

    def __init__(self, task: Task) -> None:
        self.url = task.url
        self._task = task
        with (task.local / UPLOAD_LOG_FILE).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tfdist_cli.run_storage", task.as_argument()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the job; the upload ends after it
            )
        self._problem: str | None = None

    def finish(self, exit_code: int) -> str:
        """Waits until everything is uploaded, or cannot be.

        Args:
            exit_code: that of the launcher.

        Returns:
            What is not uploaded, and why; empty if everything is.
        """
        if self._problem is None:
            with suppress(OSError), _pipe(self._process.stdin) as stdin:
                stdin.write(f"{exit_code}\n".encode())
            try:
                self._problem = self._wait()
            except (KeyboardInterrupt, SystemExit):  # a second Ctrl-C
                self._process.kill()
                self._process.wait()
                self._problem = "it was interrupted"
        return self._problem

    def _wait(self) -> str:
        with _pipe(self._process.stdout) as stdout:
            problem = stdout.read().decode(errors="replace")
        if self._process.wait() and not problem:
            return f"the process that uploads it has failed; see {self._task.local / UPLOAD_LOG_FILE}"
        return problem


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:  # both are opened as pipes
        raise ValueError("no pipe")
    return pipe
