"""Dividing steps into executions, pausing between two steps, and fetching results if a worker fails meanwhile."""

import contextlib
import queue
import time
from collections import Counter
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute.coordinator.cluster_coordinator import ClosureAbortedError
from tensorflow.python.distribute.coordinator.remote_value import RemoteValueStatus

from tests.support.compare import batches, classifier
from tests.support.local_coordinator import NoPause, local_engine
from tfdist_cli.spec.sections.updates import Updates
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.engine.pacing import Pacing
from tfdist_cli.train.engine.parameter_server.asynchronous import updates as asynchronous_updates
from tfdist_cli.train.engine.parameter_server.asynchronous.executions import WorkerExecutions
from tfdist_cli.train.engine.parameter_server.asynchronous.shared_memory import SharedExecutions
from tfdist_cli.train.engine.parameter_server.asynchronous.updates import AsynchronousUpdates, AwaitedWorkers, _fetched
from tfdist_cli.train.engine.parameter_server.transport import Transport


class Remote:
    """A remote value; each entry of the script is raised or returned by a fetch."""

    def __init__(self, *script, error=None):
        self.script, self._error, self._status = list(script), error, RemoteValueStatus.READY

    def fetch(self):
        event = self.script.pop(0)
        if event is ABORTED:
            self._status, event = RemoteValueStatus.ABORTED, ClosureAbortedError(LOST)
        if isinstance(event, Exception):
            raise event
        return event


LOST = tf.errors.UnavailableError(None, None, "Socket closed")
ABORTED = object()


def test_a_result_that_was_lost_with_its_worker_is_fetched_from_the_next_one():
    assert _fetched(Remote(LOST, LOST, "result")) == "result"


def test_a_result_that_no_worker_is_left_to_compute_is_given_up():
    left = iter([False, False, True])
    assert _fetched(Remote(LOST, LOST, "never fetched"), lambda: next(left)) is None


def test_an_execution_that_has_failed_is_raised():
    failed = tf.errors.InvalidArgumentError(None, None, "no")
    with pytest.raises(tf.errors.InvalidArgumentError):
        _fetched(Remote(failed, error=failed))


def test_an_execution_that_fails_while_it_is_fetched_is_raised():
    with pytest.raises(tf.errors.UnavailableError):
        _fetched(Remote(None, LOST, error=LOST))


def test_an_execution_that_is_aborted_with_its_worker_has_no_result():
    assert _fetched(Remote(LOST, ABORTED)) is None


def test_each_loss_of_a_worker_that_others_wait_for_is_logged_once(log):
    awaited = AwaitedWorkers()
    for lost in ([1], [], [1], [1, 2]):
        awaited.note(lost)
    awaited.returned(None)
    awaited.note([1, 2])
    assert len(log) == 2
    awaited.returned(SimpleNamespace(worker_index=1))
    awaited.note([1, 2])
    assert len(log) == 3


def test_changes_are_shared_within_runs_of_shared_memory_alone():
    shared = []
    of_memory = SharedExecutions.__new__(SharedExecutions)
    vars(of_memory)["shared"] = SimpleNamespace(share_changes=lambda: shared.append(True))
    rule = AsynchronousUpdates.__new__(AsynchronousUpdates)
    for executions, messages in ((of_memory, None), (WorkerExecutions.__new__(WorkerExecutions), queue.SimpleQueue())):
        rule._executions, rule._messages = executions, messages
        rule.share_changes()
    assert not shared
    rule._executions = of_memory
    rule.share_changes()
    assert shared == [True]


def test_variables_are_read_when_callbacks_of_a_run_use_them():
    seen = []

    @contextlib.contextmanager
    def read_when_used():
        seen.append("begins")
        yield
        seen.append("ends")

    of_memory = SharedExecutions.__new__(SharedExecutions)
    vars(of_memory)["shared"] = SimpleNamespace(read_when_used=read_when_used, outdate=lambda: seen.append("outdated"))
    rule = AsynchronousUpdates.__new__(AsynchronousUpdates)
    rule._executions, rule._messages, rule._reads_when_used = of_memory, None, False
    rule.read_updates()
    assert not seen
    for _ in range(2):
        with contextlib.ExitStack() as rule._run_context:
            rule._run_context.callback(rule._end_serving)
            rule._messages = queue.SimpleQueue()
            rule.read_updates()
            rule.read_updates()
    assert seen == ["begins", "outdated", "outdated", "ends"] * 2


def test_a_lost_ps_is_the_cause_if_changes_cannot_be_shared():
    def fails():
        raise tf.errors.CancelledError(None, None, "cancelled with the ps")

    rule = AsynchronousUpdates.__new__(AsynchronousUpdates)
    rule._executions, rule._messages = SharedExecutions.__new__(SharedExecutions), queue.SimpleQueue()
    vars(rule._executions)["shared"] = SimpleNamespace(share_changes=fails)
    rule._messages.put(LOST)
    with pytest.raises(tf.errors.UnavailableError):
        rule.share_changes()


class PauseAtUpdate(NoPause):
    """Wants a pause once the model has had a number of updates."""

    def __init__(self, model, update):
        self.model, self.update = model, update

    def wanted(self):
        return int(self.model.optimizer.iterations) >= self.update

    agreed = wanted


class Counting(keras.layers.Layer):
    """Counts its training steps in the model's state."""

    def build(self, _):
        self.count = self.add_weight(shape=(), dtype="int64", trainable=False, initializer="zeros")

    def call(self, x, training=False):
        if training:
            self.count.assign(self.count + 1)
        return x


def slow_batches():
    """Batches of which each takes a moment."""

    def wait(x):
        time.sleep(0.005)
        return x

    return batches().repeat().map(lambda x, y: (tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype), x.shape), y))


@pytest.mark.slow
def test_a_loop_ends_early_for_a_pause_and_all_counts_are_exact(servers, monkeypatch):
    build = lambda: classifier(Counting(), keras.layers.Dropout(0.5))  # noqa: E731 called within the scope
    engine, model = local_engine(monkeypatch, servers(1), build, slow_batches(), Rules(), workers=1)
    monkeypatch.setattr(Pacing, "unrolls", lambda *_: False)
    monkeypatch.setattr(Pacing, "in_flight", 1)  # a worker takes one at a time
    done, seeds = 0, [variable for variable in model.variables if "seed" in variable.path]
    while done < 300:
        pause = PauseAtUpdate(model, done + 5) if done < 100 else NoPause()
        before = done
        for execution in engine.run(300 - done, first=done, size=100, adapts=True, pause=pause):
            assert execution.first == done
            done += len(execution.losses)
            assert execution.steps.get("worker:0", 0) == len(execution.losses)
        if before < 100:
            assert before + 5 <= done < before + 60
        assert int(model.optimizer.iterations) == done
        assert int(engine._step.model.layers[0].count) == done
        engine.settle(done)
        assert [int(variable[-1]) for variable in seeds] == [done] * len(seeds)  # as if there had been no pause
    assert done == 300
    assert seeds


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize("updates", [Updates(), Updates(push_every=2), Updates(local_steps=2)])
def test_executions_grow_from_single_steps_and_all_steps_are_counted(updates, servers, monkeypatch):
    engine, model = local_engine(monkeypatch, servers(2), classifier, batches().repeat(), Rules(updates=updates))
    executions = list(engine.run(43, first=0, size=4, adapts=True, pause=NoPause()))
    assert len(executions[0].losses) == updates.steps_per_round
    assert 4 in {len(each.losses) for each in executions}
    assert sum(len(each.losses) for each in executions) == 43
    assert int(model.optimizer.iterations) == (22 if updates.push_every == 2 else 43)


@pytest.mark.slow
def test_each_worker_takes_as_many_steps(servers, monkeypatch):
    monkeypatch.setattr(asynchronous_updates, "run_for_result", lambda worker, *call: worker.create_resource(*call))
    rules = Rules(updates=Updates(worker_steps="equal"))
    engine, model = local_engine(monkeypatch, servers(2), classifier, batches().repeat(), rules)
    taken = Counter()
    engine.resume_workers({"worker:0": 9, "worker:1": 4})
    for execution in engine.run(45, first=0, size=4, adapts=True, pause=NoPause()):
        taken.update(execution.steps)
    assert taken == {"worker:0": 20, "worker:1": 25}
    assert int(model.optimizer.iterations) == 45
    assert engine.worker_steps == {"worker:0": 29, "worker:1": 29}


def added_slowly(value):
    time.sleep(0.002)  # others would assign meanwhile
    return value + 1


class AddsOne(keras.optimizers.SGD):
    """Adds 1 to each parameter, by a read and an assignment, as Keras's own updates do."""

    def update_step(self, gradient, variable, learning_rate):
        del gradient, learning_rate
        read = tf.numpy_function(added_slowly, [tf.convert_to_tensor(variable)], variable.dtype)
        self.assign(variable, tf.ensure_shape(read, variable.shape))


@pytest.mark.slow
def test_no_worker_undoes_what_another_one_has_updated_by_the_operations_of_keras(servers, monkeypatch):
    def build():
        model = classifier()
        model.compile(AddsOne(), "sparse_categorical_crossentropy")
        return model

    engine, model = local_engine(monkeypatch, servers(2), build, batches().repeat(), Rules(), workers=3)
    before = [variable.numpy() for variable in model.trainable_variables]
    taken = sum(len(execution.losses) for execution in engine.run(60, first=0, size=4, adapts=False, pause=NoPause()))
    assert taken == int(model.optimizer.iterations) == 60
    for variable, initial in zip(model.trainable_variables, before, strict=True):
        assert variable.numpy() - initial == pytest.approx(60, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_a_gradient_is_divided_by_the_scale_of_its_loss_though_another_worker_changes_it(jit, servers, monkeypatch):
    def trained(optimizer):
        keras.utils.set_random_seed(7)
        rules = Rules(jit=jit)
        build = lambda: classifier(optimizer=optimizer())  # noqa: E731 called within the scope
        engine, model = local_engine(monkeypatch, servers(1), build, batches().repeat(), rules, workers=1)
        stored.append(getattr(model.optimizer, "dynamic_scale", None))
        for _ in engine.run(6, first=0, size=2, adapts=False, pause=NoPause()):
            pass
        return [variable.numpy() for variable in model.trainable_variables]

    stored, push = [], Transport.push
    plain = trained(lambda: keras.optimizers.SGD(0.1))

    def later(self, gradients, pulled):
        with tf.control_dependencies(gradients):
            stored[-1].value.assign(stored[-1].value * 2.0)
        return push(self, gradients, pulled)

    monkeypatch.setattr(Transport, "push", later)
    ours = trained(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0))
    assert float(stored[-1].numpy()) == 8.0 * 2**6
    for own, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-6)
