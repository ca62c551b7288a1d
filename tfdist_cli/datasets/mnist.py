"""MNIST from the user's files: Keras's `mnist.npz`, or a folder with the four original IDX files.

An IDX file is a magic number (0, 0, 8 for unsigned bytes, the number of dimensions), each dimension as a big-endian
32-bit integer, then the values: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits".
"""

from __future__ import annotations

import gzip
import os
import struct
import threading
import zipfile
import zlib
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from tfdist_cli.datasets.split import check_split
from tfdist_cli.errors import TrainingError, UsageError
from tfdist_cli.spec.path_scheme import checked_location
from tfdist_cli.storage.tree import fetched

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SPLITS = ("train", "validation", "test")
PIXELS = 784
CLASSES = 10
_SIDE = 28
_UNSIGNED_BYTE = 8
_reading = threading.Lock()
"""Held while NumPy parses the headers of arrays.

Several workers' datasets are made at the same time. Python before 3.11.8 and 3.12.2 fails when two threads parse at
once, and its garbage collector runs between: "AST constructor recursion depth mismatch" (CPython's issue 106905).
"""
_HINT = "point it at mnist.npz, which `keras.datasets.mnist.load_data()` saves, or at a folder with the four IDX files"


def load(
    path: str | os.PathLike[str], split: str, *, validation: int = 5_000
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Reads one split of MNIST.

    Args:
        path: `mnist.npz`, or a folder with `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`,
            `t10k-images-idx3-ubyte` and `t10k-labels-idx1-ubyte`; also with a dot before `idx`
            (`train-images.idx3-ubyte`), and with `.gz`. A leading `~` is the home folder. Also in a storage service:
            `s3://bucket/mnist`.
        split: `train`, `validation` or `test`.
        validation: how many of the 60,000 training images, from the first on, are the `validation` split. With 5,000,
            `train` has the 55,000 images of TensorFlow 1's tutorials; with 0 it has all of them.

    Returns:
        Images, float32 of shape (n, 784) from 0 (paper) to 1 (ink), 28 rows of 28; and the digits, int64 of shape (n,).

    Raises:
        UsageError: there is no such split, or no file at `path`.
        TrainingError: a file has another format, is truncated, or does not fit the other files.
    """
    import numpy as np  # noqa: PLC0415 - a command that reads no data should not wait for it

    check_split(split, SPLITS, data="MNIST")
    part = "test" if split == "test" else "train"
    at = checked_location(os.fspath(path))
    with fetched(at.expanduser() if isinstance(at, Path) else at) as local:
        images, labels = _read(local, part)
    if split != "test":
        if not 0 <= validation <= len(images):
            raise UsageError(
                f"validation must be between 0 and {len(images)}, the training images in {path}, got {validation}",
                code="invalid-argument",
            )
        chosen = slice(validation) if split == "validation" else slice(validation, None)
        images, labels = images[chosen], labels[chosen]
    return images.reshape(len(images), PIXELS).astype(np.float32) / np.float32(255), labels.astype(np.int64)


def _read(path: Path, part: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    if path.is_dir():
        prefix = "t10k" if part == "test" else "train"
        images, labels = _read_idx(path, f"{prefix}-images", 3), _read_idx(path, f"{prefix}-labels", 1)
    elif path.exists():
        images, labels = _read_npz(path, part)
    else:
        raise UsageError(f"there is no file or folder {path}", code="no-such-file", hint=_HINT)
    if images.ndim != 3 or images.shape[1:] != (_SIDE, _SIDE):
        raise TrainingError(
            f"{path} has {part} images of shape {images.shape}, expected (n, {_SIDE}, {_SIDE})", code="data-malformed"
        )
    if labels.shape != images.shape[:1]:
        raise TrainingError(
            f"{path} has {len(images)} {part} images, and labels of shape {labels.shape}", code="data-malformed"
        )
    if labels.size and labels.max() >= CLASSES:
        raise TrainingError(
            f"{path} has the {part} label {labels.max()}, expected 0 to {CLASSES - 1}", code="data-malformed"
        )
    return images, labels


def _read_npz(path: Path, part: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    import numpy as np  # noqa: PLC0415 - as in load

    names = (f"x_{part}", f"y_{part}")
    try:
        with _reading, np.load(path, allow_pickle=False) as arrays:
            missing = [name for name in names if name not in arrays]
            if missing:
                found = ", ".join(arrays.files) or "nothing"
                raise TrainingError(
                    f"{path} has no {' and no '.join(missing)}, only {found}", code="data-malformed", hint=_HINT
                )
            images, labels = (arrays[name] for name in names)
    except (OSError, ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise TrainingError(
            f"{path} cannot be read as an npz file: {error}", code="data-malformed", hint=_HINT
        ) from error
    for name, array in zip(names, (images, labels), strict=True):
        if array.dtype != np.uint8:
            raise TrainingError(f"{name} in {path} is {array.dtype}, expected uint8", code="data-malformed")
    return images, labels


def _read_idx(folder: Path, name: str, dimensions: int) -> NDArray[np.uint8]:
    import numpy as np  # noqa: PLC0415 - as in load

    path = _find_idx(folder, name, dimensions)
    data = _read_bytes(path)
    header_size = 4 + 4 * dimensions
    magic = bytes((0, 0, _UNSIGNED_BYTE, dimensions))
    if data[:4] != magic:
        raise TrainingError(
            f"{path} is not an IDX file of {dimensions} dimensions: "
            f"it begins with {data[:4].hex(' ') or 'nothing'}, expected {magic.hex(' ')}",
            code="data-malformed",
        )
    if len(data) < header_size:
        raise TrainingError(
            f"{path} is truncated: its header has {len(data)} of {header_size} bytes", code="data-malformed"
        )
    shape = struct.unpack_from(f">{dimensions}I", data, 4)
    expected = header_size + prod(shape)
    if len(data) != expected:
        raise TrainingError(
            f"{path} has {len(data)} bytes, expected {expected} for the shape {shape}", code="data-malformed"
        )
    return np.frombuffer(data, np.uint8, offset=header_size).reshape(shape)


def _find_idx(folder: Path, name: str, dimensions: int) -> Path:
    names = [f"{name}{mark}idx{dimensions}-ubyte{suffix}" for suffix in ("", ".gz") for mark in ("-", ".")]
    for each in names:
        if (folder / each).is_file():
            return folder / each
    raise UsageError(f"{folder} has none of {', '.join(names)}", code="no-such-file", hint=_HINT)


def _read_bytes(path: Path) -> bytes:
    """Returns the content of a file, decompressed.

    Raises:
        TrainingError: it cannot be read.
    """
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise TrainingError(f"{path} cannot be read: {error}", code="unreadable-file") from error
