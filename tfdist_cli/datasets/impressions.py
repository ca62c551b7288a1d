"""Generated impressions: items that were shown to users, and whether they were clicked. Nothing is downloaded.

Each user and each item has a hidden vector. A click has the probability 1 / (1 + exp(−z)), where z is the sum of a
constant, a weight of the item, and the product of both vectors. A user's history is a few items that fit the user. No
model can be expected to rank impressions better than these probabilities do, apart from random variation.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tfdist_cli.datasets.click_generator import auc
from tfdist_cli.datasets.split import check_split
from tfdist_cli.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

SPLITS = ("train", "test")
HISTORY = 8
"""Items in a user's history."""
_BLOCK = 10_000
"""Impressions that are drawn together, with their own seed: the first ones do not depend on how many follow."""
_ZIPF = 1.1
"""The probability of the r-th most frequent user or item is proportional to r to the power of −1.1."""
_HIDDEN = 4
"""Numbers in a hidden vector."""
_CONSTANT = -1.0
_ITEM_WEIGHT = 0.5
"""The standard deviation of the items' weights. That of the product of two vectors is 2."""
_CANDIDATES = 4
"""A user's history has the best of so many times as many items, drawn by frequency."""


class Impressions(NamedTuple):
    """Generated impressions.

    Args:
        users: from 0, int64 of shape (n,).
        items: from 0, int64 of shape (n,).
        histories: items, int64 of shape (n, HISTORY).
        labels: 1 for a click, float32 of shape (n,).
        probabilities: the probability of each click, float64 of shape (n,).
    """

    users: NDArray[np.int64]
    items: NDArray[np.int64]
    histories: NDArray[np.int64]
    labels: NDArray[np.float32]
    probabilities: NDArray[np.float64]

    @property
    def best_auc(self) -> float:
        """The AUC of the true probabilities for these labels."""
        return auc(self.labels.astype(np.int64), self.probabilities)


def generate(count: int, split: str, *, users: int, items: int, seed: int = 0) -> Impressions:
    """Generates the first impressions of a split.

    Args:
        count: the number of impressions.
        split: `train` or `test`: different impressions of the same users and items.
        users: the number of users.
        items: the number of items.
        seed: of the users, the items and the impressions.

    Raises:
        UsageError: there is no such split, or a number is less than 1.
    """
    check_split(split, SPLITS, data="the generator of impressions")
    for name, number in (("impressions", count), ("users", users), ("items", items)):
        if number < 1:
            raise UsageError(f"the number of {name} must be at least 1, got {number}", code="invalid-argument")
    model, place = _model(users, items, seed), SPLITS.index(split)
    blocks = [model.draw(_BLOCK, np.random.RandomState([seed, place, number])) for number in range(-(-count // _BLOCK))]
    return Impressions(*(np.concatenate(parts)[:count] for parts in zip(*blocks, strict=True)))


class _Model:
    """The true model of a seed.

    All numbers are from NumPy's RandomState, which draws the same ones in every version of NumPy.
    """

    def __init__(self, users: int, items: int, seed: int) -> None:
        random = np.random.RandomState(seed)
        self._users, self._items = (_Frequencies(random, count) for count in (users, items))
        self._tastes = random.standard_normal((users, _HIDDEN))
        self._traits = random.standard_normal((items, _HIDDEN))
        self._weights = random.standard_normal(items) * _ITEM_WEIGHT
        candidates = self._items.draw(random, users * HISTORY * _CANDIDATES).reshape(users, -1)
        fit = np.einsum("uh,uch->uc", self._tastes, self._traits[candidates])
        best = np.argsort(-fit, axis=1, kind="stable")[:, :HISTORY]
        self._histories = np.take_along_axis(candidates, best, axis=1)

    def draw(self, count: int, random: np.random.RandomState) -> Impressions:
        """Generates impressions."""
        users, items = self._users.draw(random, count), self._items.draw(random, count)
        z = _CONSTANT + self._weights[items] + (self._tastes[users] * self._traits[items]).sum(axis=1)
        probabilities = 1 / (1 + np.exp(-z))
        labels = (random.random_sample(count) < probabilities).astype(np.float32)
        return Impressions(users, items, self._histories[users], labels, probabilities)


class _Frequencies:
    """Numbers of users or items, some of which are drawn more often than others; these are anywhere in a table."""

    def __init__(self, random: np.random.RandomState, count: int) -> None:
        cumulative = np.cumsum(np.arange(1, count + 1) ** -_ZIPF)
        self._cumulative = cumulative / cumulative[-1]
        self._numbers = random.permutation(count).astype(np.int64)

    def draw(self, random: np.random.RandomState, count: int) -> NDArray[np.int64]:
        """Draws numbers, shape (count,)."""
        return self._numbers[np.searchsorted(self._cumulative, random.random_sample(count), side="right")]


_model = lru_cache(maxsize=1)(_Model)
