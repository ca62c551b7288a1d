"""Files of datasets, on this machine or in a storage service: listed, divided among workers, and read as streams.

TensorFlow itself reads `gs://` only. These functions read every scheme of tfdist, on whichever task the pipeline runs:
each task of a cluster registers the Python functions at the end of this module by the same names.
"""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf

from tfdist_cli.spec.path_scheme import Url, location
from tfdist_cli.storage.listing import matches
from tfdist_cli.storage.remote import RemoteFolder
from tfdist_cli.storage.remote_file import PART, open_location, open_object
from tfdist_cli.train.data.shard import Shard
from tfdist_cli.train.data.streams import NEXT, STREAMS, stream
from tfdist_cli.train.tf_compat.data import call_registered, register_python

Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_GZIP = b"\x1f\x8b"
_RECORD_HEAD, _RECORD_TAIL = struct.Struct("<QI"), 4
_RECORDS = 1024
"""Records that go to TensorFlow together, at most."""
_NO_TEXTS = np.array([], dtype=object)


def list_files(pattern: Files, shard: Shard | None = None) -> list[str]:
    """Returns the files that a pattern matches, sorted by name.

    Args:
        pattern: a path or an address, such as `data/*.csv` or `s3://bucket/data/*.tfrecord`, or a list of them. `*` and
            `?` match within one folder.
        shard: returns only every `shard.count`-th file, from file `shard.index` on; None for all.

    Raises:
        UsageError: a pattern matches no file, or the service cannot be used.
    """
    given = [pattern] if isinstance(pattern, (str, os.PathLike)) else list(pattern)
    found = [file for each in given for file in matches(os.fspath(each))]
    return found[shard.index :: shard.count] if shard else found


def read_lines(files: Any) -> tf.data.Dataset:
    """Returns the lines of text files, without their ends, like `tf.data.TextLineDataset`. Gzipped files are unpacked.

    Args:
        files: a file or a list of files, or a string tensor: `dataset.interleave(tfdist.read_lines)`.
    """
    return _streamed(files, "lines")


def read_records(files: Any) -> tf.data.Dataset:
    """Returns the records of TFRecord files, like `tf.data.TFRecordDataset`. Gzipped files are unpacked.

    Args:
        files: a file or a list of files, or a string tensor: `dataset.interleave(tfdist.read_records)`.
    """
    return _streamed(files, "records")


def read_file(file: Any) -> tf.Tensor:
    """Returns the content of a file as a string tensor, like `tf.io.read_file`.

    Args:
        file: its path or address, a string or a string tensor.
    """
    register()
    return tf.ensure_shape(call_registered("read", [tf.convert_to_tensor(file)], [tf.string])[0], [])


def _streamed(files: Any, kind: str) -> tf.data.Dataset:
    register()
    if isinstance(files, os.PathLike):
        files = os.fspath(files)
    elif not tf.is_tensor(files) and not isinstance(files, str):
        files = [os.fspath(each) for each in files]
    names = tf.convert_to_tensor(files, tf.string)
    if names.shape.rank == 0:
        return _stream(names, kind)
    return tf.data.Dataset.from_tensor_slices(names).flat_map(partial(_stream, kind=kind))


def _stream(name: tf.Tensor, kind: str) -> tf.data.Dataset:
    """Returns the elements of one file."""
    return stream(name, kind, tf.TensorSpec([None], tf.string)).unbatch()


# What each task runs, in Python.


def _open(name: bytes) -> BinaryIO:
    file = _file(location(name.decode()))
    if file.peek(len(_GZIP)).startswith(_GZIP):  # type: ignore[attr-defined]
        return gzip.open(file)  # type: ignore[return-value]
    return file


def _file(at: Any) -> BinaryIO:
    if isinstance(at, Path):
        return open_location(at)
    scheme, _, rest = at.partition("://")
    bucket, _, path = rest.partition("/")
    return open_object(_folder(f"{scheme}://{bucket}"), path)


@lru_cache(maxsize=16)
def _folder(url: str) -> RemoteFolder:
    """Returns a bucket: its connections are used for all of its files."""
    return RemoteFolder(Url(url))


def _lines(file: BinaryIO) -> Iterator[list[bytes]]:
    rest = b""
    while block := file.read(PART):
        *whole, rest = (rest + block).split(b"\n")
        if whole:
            yield [line.removesuffix(b"\r") for line in whole]
    if rest:
        yield [rest]


def _records(file: BinaryIO) -> Iterator[list[bytes]]:
    chunk: list[bytes] = []
    size = 0
    while head := file.read(_RECORD_HEAD.size):
        length, checksum = _RECORD_HEAD.unpack(head) if len(head) == _RECORD_HEAD.size else (0, None)
        if checksum != _masked_crc(head[:8]):
            raise ValueError(f"{_name(file)} is no TFRecord file, or is damaged")
        record = file.read(length)
        if len(record) != length or len(file.read(_RECORD_TAIL)) != _RECORD_TAIL:
            raise ValueError(f"{_name(file)} is truncated")
        chunk.append(record)
        size += length
        if len(chunk) == _RECORDS or size >= PART:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _name(file: Any) -> str:
    return str(getattr(file, "name", "the file"))


@lru_cache(maxsize=1)
def _crc_table() -> list[int]:
    """CRC-32C, G. Castagnoli et al., "Optimization of cyclic redundancy-check codes with 24 and 32 parity bits"."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)  # noqa: PLW2901 the loop is the formula
        table.append(value)
    return table


def _masked_crc(data: bytes) -> int:
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _texts(chunks: Iterator[list[bytes]]) -> Iterator[Any]:
    return (np.array(chunk, dtype=object) for chunk in chunks)


def _open_lines(name: bytes) -> np.int64:
    return STREAMS.add(_texts(_lines(_open(name))), _NO_TEXTS)


def _open_records(name: bytes) -> np.int64:
    return STREAMS.add(_texts(_records(_open(name))), _NO_TEXTS)


def _read(name: bytes) -> bytes:
    with _file(location(name.decode())) as file:
        return file.read()


def register() -> None:
    """Makes this process able to read files for pipelines that another process may have made."""
    for name, function in (("lines", _open_lines), ("records", _open_records), ("read", _read), (NEXT, STREAMS.next)):
        register_python(name, function, by_pipelines=True)
