"""That executions in shared memory take the same steps, whether several of them are one function or none."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.local_coordinator import NoPause, local_engine
from tests.support.trained_in_runs import examples, network, recurrent, trained
from tfdist_cli.spec.sections.updates import Updates
from tfdist_cli.train.cluster.shared_memory import parameter_operations, threads
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.engine.pacing import Pacing
from tfdist_cli.train.engine.parameter_server import step_rows
from tfdist_cli.train.engine.parameter_server.asynchronous.shared_executions import SharedExecutions
from tfdist_cli.train.engine.parameter_server.engine import ParameterServerEngine
from tfdist_cli.train.engine.parameter_server.workers import Workers

RUNS = ((2, 2), (13, 8), (5, 2))
"""Steps, and steps in an execution: workers take some of them one by one."""


@pytest.fixture
def engine_of(monkeypatch, servers):
    """Makes an engine whose only worker shares memory with the only ps, and its model."""
    monkeypatch.setattr(ParameterServerEngine, "_share_memory", lambda self: True)
    monkeypatch.setattr(Workers, "share_memory_now", True)
    for shared in (parameter_operations, threads):
        shared.register()
    strategy = servers(1)

    def made(build, updates=None, **rules):
        given = Rules(updates or Updates(), **rules)
        engine, model = local_engine(monkeypatch, strategy, build, examples().batch(16, True), given, workers=1)
        assert isinstance(engine._updates._executions, SharedExecutions)
        return engine, model

    return made


@pytest.fixture
def one_thread(monkeypatch):
    """Workers have one thread for an operation, and take four steps in a function as soon as so many are left."""
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "1")
    monkeypatch.setattr(Pacing, "unchecked_steps", 100)
    monkeypatch.setattr(step_rows, "MOST_TOGETHER", 4)


def adam():
    return keras.optimizers.Adam(0.01, epsilon=1e-3)


@pytest.mark.parametrize(
    ("build", "updates", "rules"),
    [
        (partial(network, adam), Updates(), {}),
        (partial(network, adam), Updates(push_every=2), {"phases": True}),
        (recurrent, Updates(), {}),
        (partial(network, adam), Updates(), {"jit": True}),
    ],
    ids=["plain", "two_batches_in_an_update", "with_a_loop", "compiled_by_XLA"],
)
def test_rounds_that_are_one_function_are_those_that_are_taken_one_by_one(
    build, updates, rules, engine_of, one_thread, monkeypatch, caplog
):
    caplog.set_level("INFO", "tfdist")
    engine, model = engine_of(build, updates, **rules)
    found = trained(engine, model, RUNS)
    assert not [each for each in caplog.messages if "executor" in each]
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS")
    engine, model = engine_of(build, updates, **rules)
    expected = trained(engine, model, RUNS)
    assert len(found[0]) == 20
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for value, wanted in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("unchecked", [3, 4])
def test_the_single_threaded_executor_runs_several_that_need_no_check(unchecked, engine_of, one_thread, monkeypatch):
    """Without it, a training fails where several steps may be taken without a look at whether it is to pause."""
    monkeypatch.setattr(step_rows, "SINGLE_THREADED", "NO_SUCH_EXECUTOR")
    monkeypatch.setattr(Pacing, "unchecked_steps", unchecked)
    engine, model = engine_of(partial(network, adam))
    trained(engine, model, [(2, 2)])
    if unchecked == 3:
        assert len(trained(engine, model, [(8, 8)])[0]) == 8
    else:
        with pytest.raises(tf.errors.OpError) as failure:
            trained(engine, model, [(8, 8)])
        assert "NO_SUCH_EXECUTOR" in str(failure.value)


class Pausing(NoPause):
    """Wants to pause as soon as it is asked."""

    def wanted(self):
        return True


def test_an_execution_that_begins_after_a_stop_takes_no_step(engine_of, one_thread):
    engine, model = engine_of(partial(network, adam))
    before = [each.numpy() for each in model.variables]
    engine._updates._executions.begin()
    engine._updates._executions.stop()
    executions = list(engine.run(8, first=0, size=8, adapts=False, pause=Pausing()))
    assert not sum(len(each.losses) for each in executions)
    for value, wanted in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(value.numpy(), wanted)
