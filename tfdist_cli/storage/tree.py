"""Uploads of results: a file, or a folder of files."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from tfdist_cli.errors import ResultNotSaved, UsageError
from tfdist_cli.spec.path_scheme import Location, Url
from tfdist_cli.storage.remote import RemoteFolder


def exists(url: Url) -> bool:
    """Returns whether there is an object at an address, or below it.

    Raises:
        UsageError: the service cannot be used.
    """
    return bool(_names(url))


def check_replaceable(url: Url, entries: Collection[str]) -> None:
    """Checks that a folder has no other entries than an earlier result.

    Args:
        url: the folder.
        entries: the names of the files and folders that it may have.

    Raises:
        UsageError: it has others, or the service cannot be used.
    """
    found = {name.partition("/")[0] for name in _names(url)} - set(entries)
    if found:
        raise UsageError(
            f"{url} exists, and is not an earlier export: it has {min(found)}",
            code="export-path-exists",
            hint="choose another address, or remove it",
        )


def upload_result(local: Path, url: Url, last: str = "") -> None:
    """Uploads a file, or a folder that replaces the one at the address.

    Args:
        local: the file or folder.
        url: where it is stored.
        last: the file of a folder that is uploaded last: readers take a folder with it to be complete.

    Raises:
        ResultNotSaved: it could not be uploaded; it stays here.
    """
    try:
        if local.is_file():
            RemoteFolder(url.parent).upload(local, url.name)
            return
        remote = RemoteFolder(url)
        before = remote.sizes()
        names = [str(path.relative_to(local)) for path in local.rglob("*") if path.is_file()]
        for name in sorted(names, key=lambda name: (name == last, name)):
            remote.upload(local / name, name)
        remote.delete(set(before) - set(names))
    except OSError as error:
        raise ResultNotSaved(
            f"{local} could not be uploaded to {url}: {error.strerror or error}",
            code="result-not-uploaded",
            hint=f"it is in {local}: copy it to {url}, or call the command again",
        ) from error


@contextmanager
def fetched(at: Location) -> Iterator[Path]:
    """Yields a file or a folder on this machine: of one in a storage service a copy, which is removed afterwards.

    Raises:
        UsageError: the service cannot be used, or has nothing there.
    """
    if isinstance(at, Path):
        yield at
        return
    with tempfile.TemporaryDirectory(prefix="tfdist-fetched-") as folder:
        copy = Path(folder) / at.name
        try:
            _fetch(at, copy)
        except OSError as error:
            raise _unreachable(at, error) from error
        yield copy


def _fetch(url: Url, copy: Path) -> None:
    try:
        RemoteFolder(url.parent).describe(url.name)
    except FileNotFoundError:
        names = _names(url)
        for name in names:
            RemoteFolder(url).download(name, copy / name)
    else:
        names = [url.name]
        RemoteFolder(url.parent).download(url.name, copy)
    if not names:
        raise UsageError(f"there is no file or folder {url}", code="no-such-file", hint="check the address")


def _names(url: Url) -> Collection[str]:
    """Returns the names of all objects at an address, and below it."""
    try:
        return RemoteFolder(url).sizes().keys()
    except OSError as error:
        raise _unreachable(url, error) from error


def _unreachable(url: Url, error: OSError) -> UsageError:
    return UsageError(
        f"{url} cannot be read: {error.strerror or error}",
        code="storage-unreachable",
        hint="check the address and the credentials",
    )
