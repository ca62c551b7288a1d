"""Compares the first examples of the workers' shards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.finding import Finding

Digests = tuple[bytes, ...]
"""A digest of each example, in the order of the data."""


def digests(examples: tf.data.Dataset, count: int) -> Digests:
    """Returns the digests of the first examples of a dataset."""
    return tuple(_digest(example) for example in examples.take(count))


def same_examples(drawn: Sequence[tuple[int, Digests]], shards: int, place: str) -> Iterator[Finding]:
    """Yields a finding if two shards begin with the same examples; at most one.

    Args:
        drawn: the index of each shard, and the digests of its first examples.
        shards: the number of shards.
        place: where the dataset is made.
    """
    for (one, first), (other, second) in combinations(drawn, 2):
        if first == second and len(set(first)) > 1:  # equal examples alone may be in all shards
            yield Finding(
                code="same-examples",
                level="error",
                place=place,
                message=f"shards {one} and {other} of {shards} begin with the same {len(first)} examples: workers "
                "would train on the same data",
                fix="return dataset.shard(shard.count, shard.index), or draw random examples with a seed that depends "
                "on shard.worker; if each worker is to train on all data, write train: {share: copy} in the recipe",
            )
            return


def _digest(example: Any) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for part in tf.nest.flatten(example, expand_composites=True):
        value = np.asarray(part)
        found.update(repr(value.tolist()).encode() if value.dtype == object else value.tobytes())
    return found.digest()
