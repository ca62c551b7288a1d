"""Synchronous and bounded updates go on with another number of workers."""

import numpy as np
import pytest

from tests.support.compare import batches, classifier
from tests.support.local_coordinator import LocalWorker, NoPause, local_engine
from tfdist_cli.spec.sections.updates import LearningRate, Updates
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.engine.parameter_server.engine import ParameterServerEngine
from tfdist_cli.train.engine.parameter_server.lockstep import shared_memory, worker_updates
from tfdist_cli.train.engine.parameter_server.lockstep.shared_memory import SharedLockstepFunctions
from tfdist_cli.train.engine.parameter_server.workers import Workers
from tfdist_cli.train.tf_compat.keras_optimizer import iterations

RULES = [{"mode": "sync"}, {"mode": "sync", "aggregate": 2}, {"mode": "bounded", "staleness": 1}]


def change_to(engine, strategy, indices, monkeypatch):
    """Lets the engine find that workers have joined and left."""
    with monkeypatch.context() as patch:
        patch.setattr(Workers, "change", True)

        def take_changes():
            engine._workers._active = [LocalWorker(index, strategy) for index in indices]
            return []

        patch.setattr(engine._workers, "take_changes", take_changes, raising=False)
        assert engine._workers.change
        return engine.change_workers(6)


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize("updates", RULES, ids=str)
def test_an_update_takes_the_gradients_of_the_workers_of_now(updates, servers, monkeypatch):
    strategy = servers(2)
    rules = Rules(Updates(**updates), LearningRate(scale="linear"))
    engine, model = local_engine(monkeypatch, strategy, classifier, batches(), rules)
    monkeypatch.setattr("tests.support.local_coordinator.PerWorker.__getitem__", of_index, raising=False)
    executions = list(engine.run(6, first=0, size=2, adapts=False, pause=NoPause()))
    assert {name for each in executions for name in each.steps} == {"worker:0", "worker:1"}
    assert change_to(engine, strategy, [0, 1], monkeypatch) is False
    assert change_to(engine, strategy, [0, 2, 3], monkeypatch) is True
    engine.begin_epoch()
    assert engine.workers == engine.sharers == 3
    assert engine._context.batches_per_update == updates.get("aggregate", 3)
    assert engine._context.worker_count == 3
    executions = list(engine.run(6, first=6, size=2, adapts=False, pause=NoPause()))
    steps = [sum(each.steps.get(f"worker:{index}", 0) for each in executions) for index in (0, 2, 3)]
    assert sum(len(each.losses) for each in executions) == 6
    assert {name for each in executions for name in each.steps} <= {"worker:0", "worker:2", "worker:3"}
    if "aggregate" not in updates:
        assert steps == [6, 6, 6]
    assert int(np.asarray(iterations(model.optimizer).value)) == 12


def shares_memory(monkeypatch):
    """Lets all tasks of the start share memory."""
    monkeypatch.setattr(ParameterServerEngine, "_share_memory", lambda self: True)
    monkeypatch.setattr(worker_updates, "opens_memory", lambda _: True)
    monkeypatch.setattr(shared_memory, "ps_devices", lambda _: ["/job:localhost/replica:0/task:0/device:CPU:0"])


def test_workers_that_share_no_memory_get_updates_of_their_own(servers, monkeypatch):
    """They may be as many as workers that did: one leaves, and another one joins from another host."""
    strategy, apart = servers(2), set()
    shares_memory(monkeypatch)
    monkeypatch.setattr(
        Workers, "share_memory_among", lambda self, workers: not {each.worker_index for each in workers} & apart
    )
    engine, _ = local_engine(monkeypatch, strategy, classifier, batches(), Rules(Updates(mode="sync")))
    functions = [engine._updates.updates.functions]
    for indices, away in (([0], set()), ([0, 1], {1}), ([0], set()), ([0, 1], {1}), ([0, 1], {0})):
        apart.clear()
        apart.update(away)
        change_to(engine, strategy, indices, monkeypatch)
        functions.append(engine._updates.updates.functions)
    shared = [isinstance(each, SharedLockstepFunctions) for each in functions]
    assert shared == [True, True, False, True, False, False]
    assert functions[1] is functions[3]
    assert functions[2] is functions[4]


def test_a_worker_that_shares_no_memory_may_take_the_place_of_one_that_did(servers, monkeypatch):
    strategy = servers(1)
    shares_memory(monkeypatch)
    monkeypatch.setattr(Workers, "share_memory_among", lambda self, workers: False)
    engine, _ = local_engine(monkeypatch, strategy, classifier, batches(), Rules(Updates(mode="sync")))
    assert isinstance(engine._updates.updates.functions, SharedLockstepFunctions)
    assert change_to(engine, strategy, [0, 1], monkeypatch) is True
    assert not isinstance(engine._updates.updates.functions, SharedLockstepFunctions)


def of_index(remotes, index):
    """The remote value of a worker, whose index may be larger than its place."""
    return list.__getitem__(remotes, min(index, len(remotes) - 1))


def test_asynchronous_workers_change_within_a_run(monkeypatch, servers):
    engine, _ = local_engine(monkeypatch, servers(1), classifier, batches(), Rules())
    monkeypatch.setattr(Workers, "change", True)
    assert engine.change_workers(6) is False
    assert engine.workers == 2
