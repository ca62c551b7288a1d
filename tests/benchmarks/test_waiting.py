"""The recipe of steps that wait."""

import numpy as np
import pytest

from benchmarks.programs import waiting
from tfdist_cli.train.data.comparison import sample
from tfdist_cli.train.data.shard import ALL

pytestmark = pytest.mark.slow

PARAMS = {"wait": [10.0, 20.0], "batch": 4}


def test_each_worker_waits_by_itself_and_all_have_the_same_arrays(monkeypatch):
    samples, waits = [], []
    for worker in range(2):
        monkeypatch.setattr(waiting, "_worker", lambda worker=worker: worker)
        data = waiting.dataset(PARAMS, "train", ALL)
        samples.append(sample(data))
        (_, milliseconds), _ = next(iter(data.batch(PARAMS["batch"])))
        waits.append(float(np.sum(milliseconds)))
    assert waits == pytest.approx(PARAMS["wait"])
    np.testing.assert_array_equal(*samples)
