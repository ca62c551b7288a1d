"""Every update rule trains two workers, on parameter servers that are this process."""

from typing import Any

import keras
import numpy as np
import pytest

from tests.support.compare import batches, classifier, difference
from tests.support.local_coordinator import NoPause, local_engine
from tests.support.python_data import Rows
from tfdist_cli.spec.sections.updates import Updates
from tfdist_cli.train.cluster.shared_memory import tensors
from tfdist_cli.train.data.inputs import Inputs
from tfdist_cli.train.data.python_data.buffered import BufferedSource
from tfdist_cli.train.data.shard import Shard
from tfdist_cli.train.engine.base import Execution, Rules
from tfdist_cli.train.engine.parameter_server import engine, synchronous, transport
from tfdist_cli.train.engine.parameter_server.lockstep.updates import LockstepUpdates
from tfdist_cli.train.engine.parameter_server.quorum.updates import QuorumUpdates
from tfdist_cli.train.model import evaluation
from tfdist_cli.train.trainer.evaluate import Watch

pytestmark = pytest.mark.slow

STEPS = 6
RULES = {
    "async": Updates(),
    "push_every": Updates(push_every=2),
    "local_steps": Updates(local_steps=2),
    "lockstep": Updates(mode="sync"),
    "backup worker": Updates(mode="sync", aggregate=1),
    "bounded": Updates(mode="bounded", staleness=1),
}
UPDATES = {"push_every": STEPS // 2}
"""Updates in these steps, if a step is not an update."""


def trained(monkeypatch, strategy, rules, *, runs=1, size=2, pause=None, workers=2):
    """An engine after some runs, its model, and the executions."""
    keras.utils.set_random_seed(7)
    build = lambda: classifier(optimizer=keras.optimizers.SGD(0.1))  # noqa: E731 called within the scope
    engine, model = local_engine(monkeypatch, strategy, build, batches(), rules, workers=workers)
    executions: list[Execution] = []
    for _ in range(runs):
        done = sum(len(execution.losses) for execution in executions)
        executions += engine.run(STEPS, first=done, size=size, adapts=False, pause=pause or NoPause())
    return engine, model, executions


@pytest.mark.rotates(5)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [1, 2])
def test_every_rule_trains(rule, size, servers, monkeypatch):
    _, model, executions = trained(monkeypatch, servers(2), Rules(updates=RULES[rule]), runs=2, size=size)
    assert sum(len(execution.losses) for execution in executions) == 2 * STEPS
    steps = [step for each in executions for step in range(each.first, each.first + len(each.losses))]
    assert steps == list(range(2 * STEPS))
    assert int(model.optimizer.iterations) == 2 * UPDATES.get(rule, STEPS)
    assert np.isfinite(np.concatenate([execution.losses for execution in executions])).all()


def test_lockstep_and_a_quorum_of_all_workers_train_alike(servers, monkeypatch):
    found = []
    for implementation in (LockstepUpdates, QuorumUpdates):
        monkeypatch.setattr(synchronous, "LockstepUpdates", implementation)
        _, model, executions = trained(monkeypatch, servers(2), Rules(updates=RULES["lockstep"]), size=3)
        found.append((model, np.concatenate([execution.losses for execution in executions])))
    (one, losses), (other, other_losses) = found
    assert difference(one.variables, other.variables) < 1e-6
    np.testing.assert_allclose(losses, other_losses, rtol=1e-5)


@pytest.fixture
def one_host(monkeypatch):
    """Returns the process that shares memory with itself: all variables that have a value are large."""
    process = tensors._Process()
    monkeypatch.setattr(tensors, "_process", process)
    monkeypatch.setattr(transport, "LARGE_SHARED_BYTES", 1)
    monkeypatch.setattr(engine, "cluster_addresses", lambda: ["localhost:1", "localhost:2"])
    monkeypatch.setattr(engine, "ps_devices", lambda _: ["CPU:0"])
    return process


@pytest.mark.rotates(5)
@pytest.mark.parametrize("rule", ["lockstep", "bounded", "backup worker"])
def test_in_shared_memory_a_rule_trains_the_same(rule, servers, monkeypatch, one_host):
    found = []
    for registered in (False, True):
        if registered:
            one_host.register()
        _, model, executions = trained(monkeypatch, servers(2), Rules(updates=RULES[rule]), workers=1)
        assert bool(one_host._buffers and one_host._buffers._buffers) == registered
        found.append((model, np.concatenate([execution.losses for execution in executions])))
    (one, losses), (other, shared_losses) = found
    assert difference(one.variables, other.variables) == 0
    np.testing.assert_array_equal(losses, shared_losses)


@pytest.mark.rotates(5)
@pytest.mark.parametrize("rule", ["lockstep", "bounded", "backup worker"])
def test_phases_of_a_step_are_measured(rule, servers, monkeypatch):
    _, _, executions = trained(monkeypatch, servers(2), Rules(updates=RULES[rule], phases=True))
    tasks = {task for execution in executions for task in execution.phases}
    assert tasks <= {"worker:0", "worker:1"}
    assert tasks
    assert all((measured > -1).all() for execution in executions for measured in execution.phases.values())


class PauseAfter(NoPause):
    """Asks for a pause after a number of executions."""

    def __init__(self, executions):
        self.left = executions

    def wanted(self):
        self.left -= 1
        return self.left < 0

    def agreed(self):
        return self.left < 0


@pytest.mark.rotates(5)
@pytest.mark.parametrize("rule", ["async", "lockstep", "bounded", "backup worker"])
def test_a_pause_ends_a_run_when_the_steps_in_flight_are_done(rule, servers, monkeypatch):
    _, model, executions = trained(monkeypatch, servers(2), Rules(updates=RULES[rule]), size=1, pause=PauseAfter(1))
    done = sum(len(execution.losses) for execution in executions)
    assert done <= STEPS
    assert done or rule == "async"  # a loop may be stopped before its first step
    assert int(model.optimizer.iterations) == done


@pytest.mark.parametrize("rule", ["lockstep", "bounded"])
def test_an_aborted_run_leaves_the_engine_usable(rule, servers, monkeypatch):
    keras.utils.set_random_seed(7)
    engine, model = local_engine(monkeypatch, servers(2), classifier, batches(), Rules(updates=RULES[rule]))
    list(engine.run(1, first=0, size=2, adapts=False, pause=NoPause()))
    run = engine.run(STEPS, first=1, size=2, adapts=False, pause=NoPause())
    next(run)
    with pytest.raises(KeyError):
        run.throw(KeyError)
    before = int(model.optimizer.iterations)
    executions = list(engine.run(STEPS, first=before, size=2, adapts=False, pause=NoPause()))
    assert sum(len(execution.losses) for execution in executions) == STEPS
    assert int(model.optimizer.iterations) >= before + STEPS


POWERS = 2.0 ** np.arange(16, dtype=np.float32)[:, None]
"""As many of these that are not all of them have another sum."""


class Shuffled(Rows):
    """Batches of one row, in another order after each epoch."""

    draw = np.random.default_rng(7)

    def on_epoch_end(self):
        self.arrays = [self.draw.permutation(array) for array in self.arrays]


def summing():
    """Its loss is the mean of the inputs."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mae")
    return model


def test_workers_score_each_batch_of_a_dataset_that_shuffles_once(servers, monkeypatch):
    rows = Shuffled(POWERS, np.zeros_like(POWERS), batch=1)
    data = Inputs.of(rows).dataset_function(None, shuffle=False)
    made, _ = local_engine(monkeypatch, servers(2), summing, batches(POWERS, POWERS), Rules())
    for _ in range(3):
        scored = made.evaluate(data, steps=None, watch=Watch(None, reports=False)).logs()
        assert scored["loss"] == np.mean(POWERS)


def test_what_an_evaluation_has_scored_is_let_go_of(servers, monkeypatch):
    forgotten: list[int] = []
    forget = BufferedSource.forget

    def forgetting(source, before):
        forgotten.append(before)
        forget(source, before)

    monkeypatch.setattr(evaluation, "EXECUTION_SECONDS", 0.0)
    monkeypatch.setattr(BufferedSource, "forget", forgetting)
    rows = Rows(POWERS, np.zeros_like(POWERS), batch=1)
    data = Inputs.of(rows).dataset_function(None, shuffle=False)
    made, _ = local_engine(monkeypatch, servers(2), summing, batches(POWERS, POWERS), Rules())
    assert made.evaluate(data, steps=None, watch=Watch(None, reports=False)).logs()["loss"] == np.mean(POWERS)
    assert forgotten == sorted(forgotten)
    assert forgotten[0] == 0
    assert len(POWERS) - forgotten[-1] <= 4


def test_another_worker_continues_a_share_whose_begin_is_gone(monkeypatch):
    monkeypatch.setattr(engine, "CHIEF_DEVICE", "CPU:0")
    rows: Any = Inputs.of(Rows(POWERS, batch=1)).dataset_function(None, shuffle=False)
    data = rows.buffered()
    assert len(list(data(Shard(0, 2, 0)))) == 8
    data.forget(10)
    for done, skip in ((0, 5), (5, 0), (4, 1)):
        left = engine._iterator(data, Shard(1, 2, 1, done), ends=True, skip=skip)
        assert [float(x[0, 0]) for (x,) in left] == POWERS[11::2, 0].tolist()
