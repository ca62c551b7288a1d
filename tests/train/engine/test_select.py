"""The engine of a cluster."""

from types import SimpleNamespace

import pytest

from tfdist_cli.spec.sections.updates import Updates
from tfdist_cli.spec.strategies import STRATEGIES
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.cluster.join import ClusterContext
from tfdist_cli.train.engine import select
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.engine.select import select_engine


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
