"""The sums of many updates are those of each of them."""

import numpy as np
import pytest

from tfdist_cli.train.engine.parameter_server.accumulator import Accumulator
from tfdist_cli.train.engine.parameter_server.messages import ReportLayout

LAYOUT = ReportLayout(metrics=3, state=2, phases=0)


@pytest.mark.parametrize("by_examples", [False, True])
@pytest.mark.parametrize(("updates", "workers"), [(1, 1), (1, 3), (20, 2), (4, 9)])
def test_updates_of_all_workers_count_like_one_after_another(updates, workers, by_examples):
    reports = np.random.default_rng(0).random([updates, workers, LAYOUT.size + 1])
    reports[:, :, 1] = np.arange(1, updates * workers + 1).reshape([updates, workers])
    together, alone = (Accumulator(7, by_examples=by_examples) for _ in range(2))
    losses, examples, metrics, _ = LAYOUT.split(reports)
    together.updates_of_all(losses, examples, metrics)
    for update in reports:
        steps = [LAYOUT.unpack(worker, numbers) for worker, numbers in enumerate(update)]
        alone.update(steps, [0] * workers)
    found, expected = (each.execution(1, gap=0) for each in (together, alone))
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-12)
    np.testing.assert_allclose(found.metrics, expected.metrics, rtol=1e-12)
    assert (found.steps, found.examples) == (expected.steps, expected.examples)
    assert found.first == 7
    for name, report in expected.reports.items():
        own = found.reports[name]
        assert (own.batches, own.dropped, own.staleness) == (report.batches, 0, (0,) * updates)
        assert own.loss == pytest.approx(report.loss)


def test_metrics_may_follow_each_other_otherwise():
    """The last ones take the place of those before, for logs that do not follow from sums."""
    sums = Accumulator(0, following=lambda _, counted: counted)
    sums.updates_of_all(np.ones([3, 2]), np.ones([3, 2]), np.arange(6.0).reshape([3, 2, 1]))
    assert sums.metrics.tolist() == [9]
