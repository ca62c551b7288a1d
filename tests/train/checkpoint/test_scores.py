"""The best checkpoint, and when no better one has come for long."""

import json
import math

import pytest

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.train.checkpoint.scores import CheckpointScores, stop_reason


def scored(*values, patience=2, maximizes=False):
    scores = CheckpointScores("val_loss", maximizes=maximizes, patience=patience)
    return scores, [scores.add(10 * index, {"loss": value}) for index, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "maximizes", "better", "best", "stops"),
    [
        ([3, 2, 2, 1], False, [True, True, False, True], 30, False),
        ([3, 2, 2, 2.5], False, [True, True, False, False], 10, True),
        ([3, 2, 4], True, [True, False, True], 20, False),
        ([math.nan, 2, math.nan, math.nan], False, [False, True, False, False], 10, True),
        ([math.nan, math.nan], False, [False, False], None, True),
    ],
)
def test_the_best_one_and_the_end(values, maximizes, better, best, stops):
    scores, found = scored(*values, maximizes=maximizes)
    assert (found, scores.best, scores.stops) == (better, best, stops)


def test_scores_survive_a_restart():
    before, _ = scored(3, 2, 2)
    content = json.dumps(before.packed()).encode()
    after = CheckpointScores("val_loss", maximizes=False, patience=2)
    after.restore(content)
    assert not after.add(10, {"loss": 2})  # evaluated again
    assert not after.add(30, {"loss": 2.2})
    assert (after.best, after.best_value, after.stops) == (10, 2, True)
    assert stop_reason(content) is None
    assert stop_reason(json.dumps(after.packed()).encode())


@pytest.mark.parametrize("content", [b"", b"[]", b'{"monitor": "val_accuracy", "values": {"1": 0.5}}'])
def test_other_scores_are_not_taken(content):
    scores = CheckpointScores("val_loss", maximizes=False, patience=None)
    scores.restore(content)
    assert (scores.best, scores.stops, stop_reason(content)) == (None, False, None)


def test_a_metric_that_the_model_does_not_have():
    with raises(UsageError, "unknown-monitor"):
        CheckpointScores("val_auc", maximizes=True, patience=None).add(1, {"loss": 1.0})
