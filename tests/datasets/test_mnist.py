"""Tests of reading MNIST from files in their original formats, and of malformed files."""

import gc
import gzip
import struct
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.codes import raises
from tfdist_cli.datasets import mnist
from tfdist_cli.errors import TfdistError, TrainingError, UsageError
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.storage.remote import RemoteFolder

TRAIN, TEST = 12, 4


def examples(count, seed):
    generator = np.random.default_rng(seed)
    images = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
    images[0, 0, :2] = (0, 255)
    return images, generator.integers(0, 10, count, dtype=np.uint8)


@pytest.fixture
def arrays():
    (x_train, y_train), (x_test, y_test) = examples(TRAIN, 0), examples(TEST, 1)
    return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}


def idx(array):
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx(folder, arrays, *, mark="-", compress=False):
    folder.mkdir()
    for prefix, part in (("train", "train"), ("t10k", "test")):
        for kind, key, dimensions in (("images", "x", 3), ("labels", "y", 1)):
            data = idx(arrays[f"{key}_{part}"])
            name = f"{prefix}-{kind}{mark}idx{dimensions}-ubyte"
            path = folder / (f"{name}.gz" if compress else name)
            path.write_bytes(gzip.compress(data) if compress else data)
    return folder


@pytest.fixture
def folder(tmp_path, arrays):
    return write_idx(tmp_path / "idx", arrays)


@pytest.fixture
def npz(tmp_path, arrays):
    path = tmp_path / "mnist.npz"
    np.savez(path, **arrays)
    return path


def test_npz(npz, arrays):
    x, y = mnist.load(npz, "test")
    assert x.shape == (TEST, 784)
    assert (x.dtype, y.dtype) == (np.float32, np.int64)
    np.testing.assert_allclose(x, arrays["x_test"].reshape(TEST, 784) / 255, rtol=1e-6)
    np.testing.assert_array_equal(y, arrays["y_test"])
    assert (x.min(), x.max()) == (0.0, 1.0)


@pytest.mark.parametrize("mark", ["-", "."])
@pytest.mark.parametrize("compress", [False, True])
def test_idx_files_equal_npz(tmp_path, arrays, npz, mark, compress):
    folder = write_idx(tmp_path / "idx", arrays, mark=mark, compress=compress)
    for split in mnist.SPLITS:
        for from_idx, from_npz in zip(
            mnist.load(folder, split, validation=5), mnist.load(npz, split, validation=5), strict=True
        ):
            np.testing.assert_array_equal(from_idx, from_npz)


@pytest.mark.parametrize("name", ["idx", "mnist.npz"])
def test_files_in_a_storage_service(name, folder, npz):
    url = Url(f"memory://{uuid.uuid4()}")
    for path in (npz, *folder.iterdir()):
        RemoteFolder(url).write(str(path.relative_to(npz.parent)), path.read_bytes())
    for found, expected in zip(mnist.load(url / name, "test"), mnist.load(npz, "test"), strict=True):
        np.testing.assert_array_equal(found, expected)
    with raises(UsageError, "no-such-file"):
        mnist.load(url / "missing", "test")


def test_validation_has_the_first_training_images(npz, arrays):
    _, whole = mnist.load(npz, "train", validation=0)
    _, first = mnist.load(npz, "validation", validation=5)
    _, rest = mnist.load(npz, "train", validation=5)
    np.testing.assert_array_equal(whole, arrays["y_train"])
    np.testing.assert_array_equal(first, arrays["y_train"][:5])
    np.testing.assert_array_equal(rest, arrays["y_train"][5:])


def test_validation_is_5000_by_default(tmp_path):
    labels = np.zeros(60_000, np.uint8)
    write_idx(
        tmp_path / "idx",
        {"x_train": np.zeros((60_000, 28, 28), np.uint8), "y_train": labels}
        | {"x_test": np.zeros((1, 28, 28), np.uint8), "y_test": labels[:1]},
    )
    assert len(mnist.load(tmp_path / "idx", "train")[1]) == 55_000
    assert len(mnist.load(tmp_path / "idx", "validation")[1]) == 5_000


def test_the_home_folder(npz, monkeypatch):
    monkeypatch.setenv("HOME", str(npz.parent))
    assert len(mnist.load("~/mnist.npz", "test")[1]) == TEST


def test_a_missing_file(tmp_path):
    with raises(UsageError, "no-such-file") as caught:
        mnist.load(tmp_path / "absent.npz", "train")
    assert "keras.datasets.mnist.load_data()" in str(caught.value.hint)


def test_an_unknown_split(npz):
    with raises(UsageError, "unknown-split") as caught:
        mnist.load(npz, "training")
    assert "'train'" in str(caught.value.hint)


def test_too_many_validation_images(npz):
    with raises(UsageError, "invalid-argument") as caught:
        mnist.load(npz, "train")
    assert {"5000", "12"} <= set(caught.value.message.replace(",", "").split())


def test_a_folder_with_a_missing_file(folder):
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with raises(UsageError, "no-such-file") as caught:
        mnist.load(folder, "test")
    assert {"t10k-labels-idx1-ubyte,", "t10k-labels.idx1-ubyte.gz"} <= set(caught.value.message.split())


IMAGES, LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
HEADER = 16


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        (IMAGES, lambda data: b"\x1f\x8b" + data[2:], "1f 8b 08 03, expected 00 00 08 03"),
        (IMAGES, lambda data: b"", "expected 00 00 08 03"),
        (LABELS, lambda data: data[:3] + b"\x03" + data[4:], "1 dimensions"),
        (IMAGES, lambda data: data[:10], "10 of 16 bytes"),
        (IMAGES, lambda data: data[:-1], "3151 bytes, expected 3152"),
        (IMAGES, lambda data: data + b"\x00", "3153 bytes, expected 3152"),
        (LABELS, lambda data: idx(np.zeros(TEST + 1, np.uint8)), "shape (5,)"),
        (LABELS, lambda data: idx(np.full(TEST, 10, np.uint8)), "label 10, expected 0 to 9"),
        (IMAGES, lambda data: idx(np.zeros((TEST, 8, 8), np.uint8)), "(4, 8, 8), expected (n, 28, 28)"),
    ],
)
def test_a_malformed_idx_file_is_named_with_its_fault(folder, name, change, named):
    path = folder / name
    path.write_bytes(change(path.read_bytes()))
    with raises(TrainingError, "data-malformed") as caught:
        mnist.load(folder, "test")
    assert str(folder) in caught.value.message
    assert named in caught.value.message


def test_a_cut_gzip_file(tmp_path, arrays):
    folder = write_idx(tmp_path / "idx", arrays, compress=True)
    path = folder / f"{IMAGES}.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with raises(TrainingError, "unreadable-file"):
        mnist.load(folder, "test")


@pytest.mark.parametrize("content", [b"", b"<!DOCTYPE html>", b"\x93NUMPY\x01\x00garbage"])
def test_a_file_of_another_format(tmp_path, content):
    path = tmp_path / "mnist.npz"
    path.write_bytes(content)
    with raises(TrainingError, "data-malformed"):
        mnist.load(path, "train")


@pytest.mark.parametrize("kept", [0.2, 0.5, 0.9, 0.999])
def test_a_cut_npz_file(npz, kept):
    data = npz.read_bytes()
    npz.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(TfdistError):
        mnist.load(npz, "train")


def test_an_npz_file_with_a_broken_array(npz):
    data = bytearray(npz.read_bytes())
    data[2000] ^= 0xFF
    npz.write_bytes(data)
    with raises(TrainingError, "data-malformed"):
        mnist.load(npz, "train")


def test_an_npz_file_with_other_arrays(tmp_path):
    np.savez(tmp_path / "other.npz", images=np.zeros(3))
    with raises(TrainingError, "data-malformed") as caught:
        mnist.load(tmp_path / "other.npz", "train")
    assert {"x_train", "y_train,", "images"} <= set(caught.value.message.split())


def test_floats_are_an_error_since_they_may_be_scaled(tmp_path, arrays):
    np.savez(tmp_path / "mnist.npz", **arrays | {"x_test": arrays["x_test"] / 255})
    with raises(TrainingError, "data-malformed") as caught:
        mnist.load(tmp_path / "mnist.npz", "test")
    assert {"x_test", "float64,", "uint8"} <= set(caught.value.message.split())


def test_a_pickled_array_is_not_unpickled(tmp_path, arrays):
    np.savez(tmp_path / "mnist.npz", **arrays | {"x_test": np.array([{}], dtype=object)})
    with raises(TrainingError, "data-malformed") as caught:
        mnist.load(tmp_path / "mnist.npz", "test")
    assert "allow_pickle" in caught.value.message


class Cycle:
    """Garbage whose removal runs Python code, in which another thread may take over."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(0)


@pytest.fixture
def eager_garbage_collection():
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(2, 1, 1)
    sys.setswitchinterval(1e-6)
    yield
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_garbage_collection")
@pytest.mark.slow
def test_several_threads_read_at_the_same_time(npz):
    """Some versions of Python fail when two threads parse headers at once."""

    def read(depth):
        if depth:
            return read(depth - 1)
        return [(Cycle(), len(mnist.load(npz, "test")[0]))[1] for _ in range(800)]

    with ThreadPoolExecutor(3) as pool:
        counts = list(pool.map(read, (3, 6, 9)))
    assert len({count for part in counts for count in part}) == 1
