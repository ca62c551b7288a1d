"""Factors of all workers are where each of them takes those of its rows."""

import math

import numpy as np
import pytest

from tfdist_cli.train.cluster.shared_memory.lockstep.factors import FactorPlaces, Factors, OwnFactors
from tfdist_cli.train.cluster.shared_memory.memory import ALIGNED

FLOATS, DOUBLES = np.dtype(np.float32), np.dtype(np.float64)


def factors_of(examples=3, rows=20, columns=8, workers=2, dtype=FLOATS):
    return Factors(examples, rows, columns, workers, dtype.itemsize)


def places_of(factors, dtype=FLOATS):
    return FactorPlaces(factors, lambda size: np.full(size, 255, np.uint8), dtype)


@pytest.mark.parametrize("dtype", [FLOATS, DOUBLES])
@pytest.mark.parametrize("columns", [1, 8, 10, 16, 500])
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_parts_have_all_rows_once_and_are_whole_lines(workers, columns, dtype):
    factors = factors_of(rows=96, columns=columns, workers=workers, dtype=dtype)
    parts = [factors.part(worker) for worker in range(workers)]
    assert [row for part in parts for row in range(96)[part]] == list(range(96))
    assert all(part.start * columns * dtype.itemsize % ALIGNED == 0 for part in parts)
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 2 * ALIGNED // math.gcd(ALIGNED, columns * dtype.itemsize)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("dtype", [FLOATS, DOUBLES])
def test_the_product_of_what_a_worker_takes_is_the_mean_of_its_rows_of_all_gradients(workers, dtype):
    factors = factors_of(workers=workers, dtype=dtype)
    places = places_of(factors, dtype)
    random = np.random.default_rng(0)
    own = [[random.random([3, size]).astype(dtype) for size in (20, 8)] for _ in range(workers)]
    for worker, each in enumerate(own):
        OwnFactors(factors, places, worker).write(*each)
    mean = sum(first.T @ second for first, second in own) / workers
    found = [first.T @ places.second for first in places.firsts]
    np.testing.assert_allclose(np.concatenate(found), mean, rtol=1e-5)
    assert [each.dtype for each in found] == [dtype] * workers


def test_a_worker_writes_nothing_but_its_own():
    factors = factors_of(workers=3)
    places = places_of(factors)
    for each in (*places.firsts, places.second):
        each.fill(7)
    own = OwnFactors(factors, places, 1)
    own.write(np.zeros([3, 20], np.float32), np.zeros([3, 8], np.float32))
    for each in (*places.firsts, places.second):
        assert [set(row.tolist()) for row in each] == [{7}] * 3 + [{0}] * 3 + [{7}] * 3
    assert sum(each.size for each in own.arrays) == 3 * 28


@pytest.mark.parametrize(
    ("suit", "changed"),
    [
        (True, {}),
        (True, {"workers": 3}),
        (True, {"examples": 64, "rows": 512, "columns": 512}),
        (False, {"examples": 300, "rows": 512, "columns": 512}),  # more values than the gradient
        (False, {"examples": 64, "rows": 512, "columns": 512, "workers": 10}),
        (False, {"columns": 1, "rows": 31}),  # the gradient does not end with a line
        (False, {"columns": 8, "rows": 2, "examples": 1}),  # not a row for each worker
        (True, {"columns": 512, "rows": 2, "examples": 1}),
    ],
)
def test_which_factors_suit(suit, changed):
    assert factors_of(**changed).suit is suit


def test_bytes_are_those_of_all_places():
    factors, taken = factors_of(rows=21, columns=16), []

    def take(size):
        taken.append(size)
        return np.zeros(size, np.uint8)

    FactorPlaces(factors, take, FLOATS)
    assert sum(size + -size % ALIGNED for size in taken) == factors.bytes
    assert Factors(*factors.packed) == factors
