"""Uploads of results: a file, or a folder of files."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from tfdist_cli.errors import ResultNotSaved, UsageError
from tfdist_cli.spec.path_scheme import Url
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


def _names(url: Url) -> Collection[str]:
    """Returns the names of all objects at an address, and below it."""
    try:
        return RemoteFolder(url).sizes().keys()
    except OSError as error:
        raise UsageError(
            f"{url} cannot be read: {error.strerror or error}",
            code="storage-unreachable",
            hint="check the address and the credentials",
        ) from error
