"""A folder in a storage service: its objects are listed, read, written, copied and deleted, with retries."""

from __future__ import annotations

import base64
import hashlib
import importlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any

from tfdist_cli.errors import UsageError
from tfdist_cli.spec.path_scheme import REQUIREMENTS, Url
from tfdist_cli.storage.retry import Retry, StorageError, reason_of

_BLOCK = 1 << 20
_CONNECT_SECONDS, _READ_SECONDS = 5, 20
"""How long a connection, or an answer of S3, is awaited before the request is sent again."""
_NO_HADOOP = ("load libjvm", "load libhdfs")
"""Parts of what pyarrow says if Java or Hadoop's client library is not there."""


@dataclass(frozen=True)
class ObjectState:
    """What tells whether an object has changed.

    Args:
        size: its bytes.
        version: the service's name for its content.
    """

    size: int
    version: str


class RemoteFolder:
    """A folder in a storage service. Objects have names relative to it, such as `step-00000010/state.json`.

    Every object is complete or absent: a service shows an object when all of it has arrived. All methods retry.

    Args:
        url: its address.
        retry: repeats requests that fail.

    Raises:
        UsageError: the library for this service is not installed, or it cannot be used.
    """

    def __init__(self, url: Url, retry: Retry | None = None) -> None:
        self.url = url
        self._retry = retry or Retry()
        self._files, self._root = _filesystem(url)

    def sizes(self, below: str = "") -> Mapping[str, int]:
        """Returns the name and the size of each object in this folder and its subfolders.

        Names that are no paths below a folder, such as `../x`, are left out: they come from other programs.

        Args:
            below: a subfolder; only its objects are listed.
        """
        return self._retry(f"listing {self.url}", partial(self._sizes, below))

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Returns the content of an object, or its bytes from `start` up to `end`.

        Raises:
            FileNotFoundError: it does not exist.
            StorageError: it is shorter.
        """
        path = self._path(name)

        def read() -> bytes:
            if start is None or end is None:
                return bytes(self._files.cat_file(path))
            found = bytes(self._files.cat_file(path, start=start, end=end))
            if len(found) != end - start:
                raise StorageError(f"{len(found)} bytes arrived instead of {end - start}")
            return found

        return self._retry(f"reading {self.url / name}", read)

    def describe(self, name: str) -> ObjectState:
        """Returns what tells whether an object has changed.

        Raises:
            FileNotFoundError: it does not exist.
        """
        path = self._path(name)

        def describe() -> ObjectState:
            self._files.invalidate_cache()
            info = self._files.info(path)
            if info.get("type") == "directory":
                raise FileNotFoundError(path)
            versions = (info.get(key) for key in ("ETag", "etag", "generation", "mtime"))
            return ObjectState(int(info["size"]), str(next(filter(None, versions), "")))

        return self._retry(f"examining {self.url / name}", describe)

    def write(self, name: str, content: bytes) -> None:
        """Writes an object, and replaces an existing one, completely or not at all.

        Raises:
            StorageError: the object has another content afterwards.
        """
        path = self._path(name)

        def write() -> None:
            self._make_parent(path)
            self._files.pipe_file(path, content)
            if bytes(self._files.cat_file(path)) != content:
                raise StorageError(f"{self.url / name} has another content than was written")

        self._retry(f"writing {self.url / name}", write)

    def upload(self, file: Path, name: str) -> None:
        """Uploads a file, and checks the object's size and checksum."""
        self._retry(f"uploading {self.url / name}", partial(self._upload, file, name))

    def download(self, name: str, file: Path) -> None:
        """Downloads an object to a file.

        Raises:
            FileNotFoundError: it does not exist.
        """
        file.parent.mkdir(parents=True, exist_ok=True)
        self._retry(f"downloading {self.url / name}", partial(self._files.get_file, self._path(name), str(file)))

    def modified(self, name: str) -> float:
        """Returns when an object was written, in seconds since 1970 by the service's clock."""
        found = self._retry(f"examining {self.url / name}", partial(self._files.modified, self._path(name)))
        return float(found.timestamp())

    def age(self, name: str) -> float | None:
        """Returns how many seconds ago an object was written, by the service's clock alone.

        Returns:
            None if the service does not tell its time.

        Raises:
            FileNotFoundError: it does not exist.
        """
        path = self._path(name)

        def age() -> float | None:
            written, now = self._files.modified(path), self._time(path)
            return None if now is None else max(0.0, now.timestamp() - float(written.timestamp()))

        return self._retry(f"examining {self.url / name}", age)

    def copy(self, name: str, target: str) -> None:
        """Copies an object within the folder; most services do so without sending its content to this machine."""
        path = self._path(target)

        def copy() -> None:
            self._make_parent(path)
            self._files.cp_file(self._path(name), path)

        self._retry(f"copying {self.url / name}", copy)

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects one after the other. One that does not exist is no error."""
        for name in names:
            with suppress(FileNotFoundError):
                self._retry(f"deleting {self.url / name}", partial(self._files.rm_file, self._path(name)))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _time(self, path: str) -> datetime | None:
        """Returns the time of the service, from its answer to a request for an object."""
        if self.url.scheme == "memory":
            return datetime.now(timezone.utc)
        if self.url.scheme not in ("s3", "gs"):
            return None
        bucket, key, _ = self._files.split_path(path)
        if self.url.scheme == "s3":
            answer = self._files.call_s3("head_object", Bucket=bucket, Key=key)["ResponseMetadata"]
            date = answer["HTTPHeaders"].get("date")
        else:
            date = self._files.call("GET", "b/{}/o/{}", bucket, key)[0].get("Date")
        return None if date is None else parsedate_to_datetime(date)

    def _make_parent(self, path: str) -> None:
        """Creates the folder of an object where folders exist: in buckets they do not."""
        if self.url.scheme not in ("s3", "gs"):
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _sizes(self, below: str) -> dict[str, int]:
        root = self._path(below)
        self._files.invalidate_cache()
        try:
            found = self._files.find(root, detail=True)
        except FileNotFoundError:
            if self._files.exists(self._root.partition("/")[0] or "/"):
                return {}
            raise  # there is no such bucket
        start = self._root.strip("/")
        names = {path.strip("/").removeprefix(f"{start}/"): info for path, info in found.items()}
        return {
            name: int(info["size"])
            for name, info in sorted(names.items())
            if info.get("type") != "directory" and not {"", ".", ".."}.intersection(name.split("/"))
        }

    def _upload(self, file: Path, name: str) -> None:
        path = self._path(name)
        self._make_parent(path)
        self._files.put_file(str(file), path)
        self._files.invalidate_cache()
        info = self._files.info(path)
        size = file.stat().st_size
        if int(info["size"]) != size:
            raise StorageError(f"{self.url / name} has {info['size']} bytes instead of {size}")
        if _digest(file, "md5") not in _reported_digests(info) and self._remote_digest(path) != _digest(file, "sha256"):
            raise StorageError(f"{self.url / name} has another content than {file}")

    def _remote_digest(self, path: str) -> str:
        digest = hashlib.sha256()
        with self._files.open(path, "rb") as object_:
            while block := object_.read(_BLOCK):
                digest.update(block)
        return digest.hexdigest()


def _reported_digests(info: Mapping[str, Any]) -> set[str]:
    """Returns the MD5 digests in an object's metadata.

    S3's ETag is one unless the object was sent in several parts, or is encrypted with a key of the user.
    """
    found = {str(info.get("ETag", "")).strip('"')}
    with suppress(ValueError):
        found.add(base64.b64decode(str(info.get("md5Hash", ""))).hex())
    return found


def _digest(file: Path, algorithm: str) -> str:
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _filesystem(url: Url) -> tuple[Any, str]:
    """Returns fsspec's file system for an address, and the address as a path in it.

    Raises:
        UsageError: the library is not installed, or it cannot be used.
    """
    options: dict[str, Any] = {"skip_instance_cache": url.scheme != "memory"}
    if url.scheme in ("s3", "gs"):
        options["use_listings_cache"] = False
    if url.scheme == "s3":  # `Retry` repeats requests
        retries = {"total_max_attempts": 1}
        options["config_kwargs"] = {
            "connect_timeout": _CONNECT_SECONDS,
            "read_timeout": _READ_SECONDS,
            "retries": retries,
        }
    try:
        files, root = importlib.import_module("fsspec.core").url_to_fs(str(url), **options)
    except ImportError as error:
        raise UsageError(
            f"{url.scheme}:// needs a library that is not installed: {error}",
            code="storage-library-missing",
            hint=f"pip install {REQUIREMENTS[url.scheme]}, on every machine whose tasks use it",
        ) from None
    except Exception as error:  # each service has exceptions of its own
        if url.scheme == "hdfs" and any(text in str(error) for text in _NO_HADOOP):
            raise UsageError(
                f"{url} needs Hadoop's client library, which pyarrow cannot load: {str(error).splitlines()[0]}",
                code="hadoop-library-missing",
                hint="install Java and Hadoop's client on every machine whose tasks use it, and set JAVA_HOME, "
                "HADOOP_HOME (or ARROW_LIBHDFS_DIR, the folder of libhdfs.so) and CLASSPATH=$(hadoop classpath --glob)",
            ) from None
        raise UsageError(
            f"{url} cannot be opened: {reason_of(error)}",
            code="storage-unusable",
            hint="see docs/how-to/buckets.md for the credentials and settings of each service",
        ) from error
    if url.scheme == "s3":
        files.retries = 1
    return files, root.rstrip("/")
