"""Checkpoints in a storage service: written to a local folder, uploaded in the background, and downloaded when read.

    s3://bucket/run/step-00001200/…     the files of a local checkpoint; state.json, its seal, is uploaded last
    s3://bucket/run/.replaced-step-…    a copy of a checkpoint, while another one of the same step replaces it
    s3://bucket/run/damaged-step-…      a damaged checkpoint, set aside
    LOCAL/step-00001200/…               the newest checkpoint, and those that are not uploaded yet
    LOCAL/.uploaded-00001200            the digest of the uploaded state.json

A folder of the service without state.json is no checkpoint. The thread that uploads is the only one that changes the
service's folder, after `prepare`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tfdist_cli.errors import TfdistError, TrainingError
from tfdist_cli.spec.path_scheme import Location, Url
from tfdist_cli.storage.remote import RemoteFolder
from tfdist_cli.storage.retry import StorageError
from tfdist_cli.train.checkpoint.durable_files import remove
from tfdist_cli.train.checkpoint.files.retention import (
    EVALUATED_FILE,
    pack_evaluated,
    parse_evaluated,
    steps_to_remove,
    undamaged,
)
from tfdist_cli.train.checkpoint.files.state import (
    STATE_FILE,
    DamagedCheckpoint,
    StoredCheckpoint,
    TrainingState,
    parse_state,
    verify,
)
from tfdist_cli.train.checkpoint.store import PREFIX, REPLACED, WRITING, CheckpointFolder, damaged_names, step_of
from tfdist_cli.train.checkpoint.uploads import Report, Uploads

_UPLOADED = ".uploaded-"
_DOWNLOADED = ".downloaded-"
_POLL_SECONDS = 5.0
"""Seconds between two looks for new checkpoints: each request to a service has its price."""

log = logging.getLogger("tfdist")


def open_checkpoints(at: Location, keep: int = 3, scratch: Path | None = None) -> CheckpointFolder:
    """Returns the checkpoints in a folder of this machine or of a storage service.

    Args:
        at: the folder.
        keep: how many of the newest checkpoints to keep.
        scratch: the local folder for checkpoints of a storage service; None for a temporary one.

    Raises:
        UsageError: the library for the service is not installed.
    """
    return BucketCheckpoints(at, keep, scratch) if isinstance(at, Url) else CheckpointFolder(at, keep)


class BucketCheckpoints(CheckpointFolder):
    """The checkpoints of one training, in a storage service.

    Args:
        url: the folder.
        keep: how many of the newest checkpoints to keep.
        scratch: the local folder; None for a temporary one.
        remote: the folder's objects.
    """

    poll_seconds = _POLL_SECONDS

    def __init__(
        self, url: Url, keep: int = 3, scratch: Path | None = None, remote: RemoteFolder | None = None
    ) -> None:
        self._temporary = None if scratch else tempfile.TemporaryDirectory(prefix="tfdist-", ignore_cleanup_errors=True)
        super().__init__(scratch or Path(self._temporary.name), keep)  # type: ignore[union-attr] # one of them is there
        self._remote = remote or RemoteFolder(url)
        self._uploads = Uploads(self._upload)
        self._uploaded: StoredCheckpoint | None = None
        """A checkpoint of the service, to which a delta refers."""

    @property
    def location(self) -> Location:
        """The folder."""
        return self._remote.url

    def prepare(self) -> None:
        """Prepares both folders. Completes or removes what a killed training left.

        Raises:
            TrainingError: the service cannot be reached, or one of the folders is not writable.
        """
        super().prepare()
        for rest in self.path.glob(f"{_DOWNLOADED}*"):
            remove(rest)
        try:
            self._complete_replacements()
            self._remove_unsealed(self._remote.sizes())
            self._remote.write(f"{WRITING}probe", b"{}")
            self._remote.delete([f"{WRITING}probe"])
        except OSError as error:
            raise _unusable(self._remote.url, error) from error

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints, damaged ones and those that are not uploaded too, oldest first.

        Raises:
            TrainingError: the service cannot be reached.
        """
        try:
            return sorted({*_sealed(self._remote.sizes()), *self._not_uploaded()})
        except OSError as error:
            raise _unusable(self._remote.url, error) from error

    def peek(self, step: int) -> StoredCheckpoint:
        """Returns the checkpoint of a step after comparing the sizes of its objects, without reading all of them.

        Raises:
            DamagedCheckpoint: it is missing or damaged.
        """
        if step in self._not_uploaded():
            with suppress(DamagedCheckpoint):
                return super().peek(step)
        return self._peek_remote(step)[1]

    def find(self, step: int) -> StoredCheckpoint:
        """Downloads the checkpoint of a step, and compares the SHA-256 of each of its files.

        Raises:
            DamagedCheckpoint: it is missing or damaged.
        """
        if step in self._not_uploaded():
            with suppress(DamagedCheckpoint):
                return super().find(step)
        name, checkpoint = self._peek_remote(step)
        if self._is_uploaded(step) and self._local_state(step) == checkpoint.state:
            with suppress(DamagedCheckpoint):
                return super().find(step)
        self._remove_downloaded()
        for file in checkpoint.state.files:
            with _service_errors_as_damage(self._remote.url / name / file):
                self._remote.download(f"{name}/{file}", checkpoint.path / file)
        verify(checkpoint)
        self._uploaded = StoredCheckpoint(checkpoint.path, checkpoint.state, self._remote.url / name)
        return checkpoint

    def set_aside(self, step: int) -> Location:
        """Copies a damaged checkpoint to another name, so that the user can examine it, and removes it.

        Raises:
            OSError: it cannot be copied or removed.
        """
        name = _name(step)
        if step in self._not_uploaded():
            return super().set_aside(step)
        taken = {each.partition("/")[0] for each in self._remote.sizes()}
        new = next(each for each in damaged_names(name) if each not in taken)
        self._move(name, new)
        return self._remote.url / new

    def publish(self, step: int, report: Report) -> None:
        """Uploads a checkpoint in the background. A newer one replaces it while it waits."""
        self._uploads.add(step, report)
        self._remove_local(before=step)  # after that: until then the upload of one that waited could begin

    def flush(self) -> None:
        """Waits until the newest checkpoint is uploaded, or has failed to be."""
        self._uploads.wait()

    def close(self, seconds: float) -> None:
        """Waits for the upload for a limited time, after the training has failed."""
        self._uploads.wait(seconds)

    def unsaved_hint(self) -> str:
        """What to do about a checkpoint that could not be uploaded."""
        return (
            f"the checkpoint is in {self.path}: launch again with the same run directory when {self.location} can be "
            "written; training resumes from it and uploads it"
        )

    def mark_evaluated(self, steps: list[int], scores: Mapping[str, Any] | None = None) -> None:
        """Writes which checkpoints the evaluator has evaluated, and `CheckpointScores.packed`."""
        self._remote.write(EVALUATED_FILE, pack_evaluated(steps, scores))

    def evaluated(self) -> bytes:
        """Returns the content of evaluator.json; empty if there is none, or it cannot be read."""
        with suppress(OSError, TfdistError):
            return self._remote.read(EVALUATED_FILE)
        return b""

    def _prune(self, newest: int) -> None:
        """Does nothing: checkpoints are removed when a newer one is uploaded."""

    def _wait_to_replace(self, step: int) -> None:
        """Waits for the upload of a checkpoint that is to be replaced."""
        if self._uploads.running == step:
            self._uploads.wait()

    def _peek_remote(self, step: int) -> tuple[str, StoredCheckpoint]:
        name = _name(step)
        url = self._remote.url
        with _service_errors_as_damage(url / name):
            sizes = self._remote.sizes(name)
            if f"{name}/{STATE_FILE}" not in sizes:
                name = f"{REPLACED}{name}"  # its replacement is not complete
                sizes = self._remote.sizes(name)
            state = parse_state(self._remote.read(f"{name}/{STATE_FILE}"), str(url / name / STATE_FILE))
        for file, (size, _) in state.files.items():
            actual = sizes.get(f"{name}/{file}")
            if actual != size:
                found = "does not exist" if actual is None else f"has {actual} bytes instead of {size}"
                raise DamagedCheckpoint(f"{url / name / file} {found}")
        return name, StoredCheckpoint(self.path / f"{_DOWNLOADED}{_name(step)}", state, url / name)

    def _not_uploaded(self) -> list[int]:
        """Returns the steps of local checkpoints that are not in the service."""
        return [step for step in super().steps() if not self._is_uploaded(step)]

    def _is_uploaded(self, step: int) -> bool:
        """Returns whether the local checkpoint of a step is in the service as it is here."""
        try:
            marked = (self.path / f"{_UPLOADED}{step:08d}").read_text(encoding="ascii")
            return marked == _digest((self._folder(step) / STATE_FILE).read_bytes())
        except (OSError, ValueError):
            return False

    def _local_state(self, step: int) -> TrainingState | None:
        with suppress(DamagedCheckpoint):
            return super().peek(step).state
        return None

    def _upload(self, step: int) -> Url:
        """Uploads a checkpoint, its seal last, and then removes old ones.

        Raises:
            OSError: it could not be uploaded.
        """
        folder, name = self._folder(step), _name(step)
        content = (folder / STATE_FILE).read_bytes()
        state = parse_state(content, str(folder / STATE_FILE))
        if not self._has_files(name, state):
            self._keep_replaced(name)
            for file in state.files:
                self._upload_file(folder / file, name, state.files[file])
        self._remote.write(f"{name}/{STATE_FILE}", content)
        self._uploaded = StoredCheckpoint(folder, state, self._remote.url / name)
        self._mark_uploaded(step, content)
        self._remove_downloaded()
        self._remove_local(before=step)
        with suppress(OSError):  # tried again with the next checkpoint
            self._remove_tree(f"{REPLACED}{name}", self._remote.sizes(f"{REPLACED}{name}"))
            self._remove_old(step)
        return self._remote.url / name

    def _upload_file(self, file: Path, name: str, entry: list[Any]) -> None:
        """Uploads a file of a checkpoint; one that the last checkpoint has, too, is copied within the service.

        Args:
            file: the file.
            name: the checkpoint's folder in the service.
            entry: the size and the digest of the file.
        """
        if (
            self._uploaded
            and self._uploaded.state.files.get(file.name) == entry
            and self._uploaded.location.name != name
        ):
            with suppress(FileNotFoundError):  # it has been removed since
                self._remote.copy(f"{self._uploaded.location.name}/{file.name}", f"{name}/{file.name}")
                return
        self._remote.upload(file, f"{name}/{file.name}")

    def _has_files(self, name: str, state: TrainingState) -> bool:
        """Returns whether the service has a checkpoint with the same files, so that only its seal is to be replaced."""
        try:
            content = self._remote.read(f"{name}/{STATE_FILE}")
            return parse_state(content, name).files == state.files
        except (FileNotFoundError, DamagedCheckpoint):
            return False

    def _keep_replaced(self, name: str) -> None:
        """Copies a checkpoint that is about to be replaced, and then removes it."""
        sizes = self._remote.sizes(name)
        if f"{name}/{STATE_FILE}" in sizes:
            self._move(name, f"{REPLACED}{name}")
        else:
            self._remote.delete(sizes)

    def _complete_replacements(self) -> None:
        """Completes or undoes a replacement that was interrupted."""
        sizes = self._remote.sizes()
        kept = {each.partition("/")[0] for each in sizes if each.startswith(f"{REPLACED}{PREFIX}")}
        for replaced in sorted(kept):
            name = replaced.removeprefix(REPLACED)
            if f"{name}/{STATE_FILE}" not in sizes and f"{replaced}/{STATE_FILE}" in sizes:
                self._remote.delete(each for each in sizes if each.startswith(f"{name}/"))
                self._move(replaced, name)
            else:
                self._remove_tree(replaced, sizes)

    def _move(self, name: str, new: str) -> None:
        sizes = self._remote.sizes(name)
        for each in _seal_last(sizes):
            self._remote.copy(each, f"{new}/{each.removeprefix(f'{name}/')}")
        self._remove_tree(name, sizes)

    def _remove_tree(self, name: str, sizes: Mapping[str, int]) -> None:
        """Removes a folder, its seal first, so that an incomplete one is never found."""
        self._remote.delete(reversed(_seal_last({each: 0 for each in sizes if each.startswith(f"{name}/")})))

    def _remove_unsealed(self, sizes: Mapping[str, int]) -> None:
        sealed = _sealed(sizes)
        self._remote.delete(
            each for each in sizes if (step := step_of(each.partition("/")[0])) is not None and step not in sealed
        )
        self._remote.delete(each for each in sizes if each.startswith(WRITING))

    def _remove_old(self, newest: int) -> None:
        sizes = self._remote.sizes()
        evaluated = None
        if EVALUATED_FILE in sizes:
            evaluated = parse_evaluated(self._remote.read(EVALUATED_FILE))
        shared = undamaged(lambda step: self._peek_remote(step)[1], [each for each in _sealed(sizes) if each <= newest])
        for step in steps_to_remove(shared, self._keep, evaluated):
            self._remove_tree(_name(step), sizes)
        self._remove_unsealed(sizes)

    def _mark_uploaded(self, step: int, content: bytes) -> None:
        with suppress(OSError):  # then it is uploaded again by a training that resumes here
            (self.path / f"{_UPLOADED}{step:08d}").write_text(_digest(content), encoding="ascii")

    def _remove_local(self, *, before: int) -> None:
        for step in super().steps():
            if step < before and step != self._uploads.running:
                remove(self._folder(step))
                remove(self.path / f"{_UPLOADED}{step:08d}")

    def _remove_downloaded(self) -> None:
        for downloaded in self.path.glob(f"{_DOWNLOADED}*"):
            remove(downloaded)


@contextmanager
def _service_errors_as_damage(url: Url) -> Iterator[None]:
    """Translates a missing object into a damaged checkpoint, and other errors of the service into TrainingErrors."""
    try:
        yield
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{url} cannot be read: {error.strerror}") from error
    except OSError as error:
        raise _unusable(url, error) from error


def scratch_folder(url: Url, run_dir: Path | None) -> Path:
    """Returns the local folder of a training's checkpoints: the same one for each launch of the training, if possible.

    Args:
        url: where the checkpoints are.
        run_dir: the run's directory; None for a folder for temporary files.
    """
    if run_dir:
        return run_dir / "checkpoints"
    folder = Path(tempfile.gettempdir()) / f"tfdist-{os.getuid()}-{_digest(url.encode())[:16]}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid == os.getuid() and not folder.is_symlink():
            return folder
    return Path(tempfile.mkdtemp(prefix="tfdist-"))


def _unusable(url: Url, error: OSError) -> TrainingError:
    reachable = not isinstance(error, StorageError)
    return TrainingError(
        f"the checkpoints in {url} cannot be used: {error.strerror or error}",
        code="checkpoint-dir-not-writable" if reachable else "storage-unreachable",
        hint="check that the bucket exists, and that the task's credentials may list, read, write and delete there"
        if reachable
        else "check the address, the network and the state of the service, and launch again",
    )


def _name(step: int) -> str:
    return f"{PREFIX}{step:08d}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _sealed(sizes: Mapping[str, int]) -> list[int]:
    """Returns the steps of the checkpoints with a seal, oldest first."""
    folders = [name.removeprefix(REPLACED).partition("/") for name in sizes if name.endswith(f"/{STATE_FILE}")]
    steps = {step_of(folder) for folder, _, rest in folders if rest == STATE_FILE}
    return sorted(step for step in steps if step is not None)


def _seal_last(names: Mapping[str, int]) -> list[str]:
    return sorted(names, key=lambda name: name.endswith(f"/{STATE_FILE}"))
