"""Tests of batch hooks: one call for each group of batches, with the batch numbers that Keras passes."""

import pytest

from tfdist_cli.train.trainer.batch_callbacks import BatchGroup


def calls_of(group_size, batches, pause_after=()):
    """Returns the calls for a pass of `batches` batches."""
    calls = []
    group = BatchGroup(
        lambda first: calls.append(("begin", first)), lambda last, logs: calls.append(("end", last)), group_size
    )
    for batch in range(batches):
        group.begin(batch)
        if group.is_full(batch) or batch in pause_after:
            group.end(batch, {})
    group.end(batches - 1, {}, data_ended=True)
    return calls


@pytest.mark.parametrize(
    ("size", "batches", "calls"),
    [
        (1, 2, [("begin", 0), ("end", 0), ("begin", 1), ("end", 1)]),
        (2, 4, [("begin", 0), ("end", 1), ("begin", 2), ("end", 3)]),
        (2, 3, [("begin", 0), ("end", 1), ("begin", 2), ("end", 3)]),
        (5, 2, [("begin", 0), ("end", 4)]),
        (5, 0, []),
    ],
)
def test_groups_are_numbered_as_in_keras(size, batches, calls):
    assert calls_of(size, batches) == calls


def test_before_a_pause_a_group_ends_with_the_last_batch():
    assert calls_of(4, 6, pause_after={1}) == [("begin", 0), ("end", 1), ("begin", 2), ("end", 5)]
