"""Tests of the included digits: their rows, and the reproducibility of the splits."""

import hashlib
from importlib import resources

import numpy as np

from tests.support.codes import raises
from tfdist_cli.datasets import digits
from tfdist_cli.errors import UsageError


def test_the_file_has_the_digest_in_its_note():
    folder = resources.files("tfdist_cli.datasets")
    checksum = hashlib.sha256(folder.joinpath("digits.csv.gz").read_bytes()).hexdigest()
    assert checksum in folder.joinpath("DIGITS.md").read_text(encoding="utf-8")


def test_shapes_types_and_ranges():
    x, y = digits.load("train")
    assert x.shape == (1437, 64)
    assert y.shape == (1437,)
    assert (x.dtype, y.dtype) == (np.float32, np.int64)
    assert (x.min(), x.max()) == (0.0, 1.0)
    assert set(np.unique(y)) == set(range(10))
    assert [array.shape for array in digits.load("test")] == [(360, 64), (360,)]


def test_the_splits_are_a_partition():
    together = np.concatenate([digits.load(split)[0] for split in digits.SPLITS])
    assert len(together) == 1797
    assert len(np.unique(together, axis=0)) == 1797


def test_the_split_is_the_same_everywhere():
    labels = np.concatenate([digits.load(split)[1] for split in digits.SPLITS])
    assert hashlib.sha256(bytes(labels.tolist())).hexdigest()[:16] == "cc988e9bc8846bfa"


def test_another_seed_gives_another_split():
    x, _ = digits.load("test")
    other, _ = digits.load("test", seed=1)
    assert not np.array_equal(x, other)


def test_an_unknown_split():
    with raises(UsageError, "unknown-split") as caught:
        digits.load("tset")
    assert "'test'" in str(caught.value.hint)
