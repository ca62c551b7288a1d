"""The engine of a cluster."""

from types import SimpleNamespace

import numpy as np
import pytest

from tfdist_cli.spec.sections.updates import Updates
from tfdist_cli.spec.strategies import STRATEGIES
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.cluster.join import ClusterContext
from tfdist_cli.train.engine import select
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.engine.select import agree, select_engine


@pytest.mark.parametrize(
    ("rules", "lines"),
    [
        ({}, 0),
        ({"updates": Updates(mode="sync")}, 0),
        ({"updates": Updates(mode="sync", batch="proportional")}, 0),
        ({"updates": Updates(push_every=2)}, 1),
        ({"micro_batches": 2}, 1),
        ({"updates": Updates(mode="sync", aggregate=1)}, 1),
    ],
)
@pytest.mark.parametrize("chief", [True, False])
def test_the_chief_of_mirrored_workers_says_what_it_ignores(rules, lines, chief, monkeypatch, log):
    members = [TaskId("worker", index) for index in range(2)]
    environment = SimpleNamespace(
        strategy="multi_worker_mirrored",
        traits=STRATEGIES["multi_worker_mirrored"],
        members=members,
        task=members[not chief],
        is_chief=chief,
    )
    monkeypatch.setattr(select, "MirroredEngine", lambda *_: "the engine")
    context = ClusterContext(environment, None)
    assert select_engine(context, None, None, Rules(**rules)) == "the engine"
    assert len(log) == lines * chief


@pytest.mark.parametrize("strategy", ["multi_worker_mirrored", "parameter_server"])
@pytest.mark.parametrize(("own", "other"), [(True, True), (True, False), (False, True), (False, False)])
def test_mirrored_tasks_decide_together_and_a_chief_alone(strategy, own, other, monkeypatch):
    members = [TaskId("worker", index) for index in range(2)]
    environment = SimpleNamespace(strategy=strategy, traits=STRATEGIES[strategy], members=members, task=members[0])
    summing = SimpleNamespace(total=lambda votes: votes + np.array([float(other)]))
    monkeypatch.setattr(select, "Collectives", lambda *_: summing)
    together = strategy == "multi_worker_mirrored"
    assert agree(ClusterContext(environment, None), own) == (own and (other or not together))
