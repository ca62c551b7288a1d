"""Tests of generated impressions: reproducible, uneven, and with labels that their features explain."""

import hashlib
from itertools import pairwise

import numpy as np
import pytest

from tests.support.codes import raises
from tfdist_cli.datasets.impressions import HISTORY, generate
from tfdist_cli.errors import UsageError

SIZES = {"users": 300, "items": 100}


def test_the_impressions_are_the_same_everywhere():
    made = generate(200, "train", **SIZES)
    joined = b"".join(part.tobytes() for part in made[:4])
    assert hashlib.sha256(joined).hexdigest()[:16] == "2a5fbb22f60a065d"


def test_the_first_ones_do_not_depend_on_the_number():
    more, fewer = generate(10_010, "train", **SIZES), generate(50, "train", **SIZES)
    for name in more._fields:
        one, other = getattr(more, name), getattr(fewer, name)
        assert len(one) == 10_010
        np.testing.assert_array_equal(one[:50], other)


def test_splits_and_seeds_differ():
    users = [
        generate(500, split, **SIZES, seed=seed).users for split, seed in (("train", 0), ("test", 0), ("train", 1))
    ]
    assert all((one != other).mean() > 0.5 for one, other in pairwise(users))


def test_a_few_users_and_items_have_most_impressions():
    made = generate(20_000, "train", **SIZES)
    for numbers, size in ((made.users, 300), (made.items, 100)):
        counts = np.sort(np.bincount(numbers, minlength=size))
        assert counts[-size // 10 :].sum() > len(numbers) / 2
        assert np.abs(np.corrcoef(np.arange(size), np.bincount(numbers, minlength=size))[0, 1]) < 0.3


def test_the_best_auc_is_that_of_the_probabilities():
    made = generate(20_000, "test", **SIZES)
    assert made.histories.shape == (20_000, HISTORY)
    assert made.labels.mean() == pytest.approx(made.probabilities.mean(), abs=0.02)
    assert 0.8 < made.best_auc < 0.9


@pytest.mark.parametrize("wrong", [{"count": 0}, {"users": 0}, {"items": -1}])
def test_a_number_below_one_is_an_error(wrong):
    with raises(UsageError, "invalid-argument"):
        generate(**{"count": 10, "split": "train", **SIZES, **wrong})
