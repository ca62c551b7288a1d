"""The engine of a cluster."""

from types import SimpleNamespace

import pytest

from tests.support.codes import raises
from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.sections.updates import Updates
from tfdist_cli.spec.strategies import STRATEGIES
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.cluster.join import ClusterContext
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.engine.select import select_engine


@pytest.mark.parametrize("chief", [True, False])
def test_mirrored_workers_refuse_batches_by_their_speeds(chief):
    environment = SimpleNamespace(
        strategy="multi_worker_mirrored",
        traits=STRATEGIES["multi_worker_mirrored"],
        members=[TaskId("worker", index) for index in range(2)],
        is_chief=chief,
    )
    rules = Rules(updates=Updates(mode="sync", batch="proportional"))
    with raises(TrainingError, "batch-needs-ps"):
        select_engine(ClusterContext(environment, None), None, None, rules)
