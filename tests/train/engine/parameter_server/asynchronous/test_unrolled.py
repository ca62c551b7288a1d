"""Functions of unrolled steps are compiled beside the training, and nothing else happens."""

import threading
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf

from tests.support.compare import batches, classifier
from tests.support.local_coordinator import NoPause, local_engine
from tests.train.engine.parameter_server.asynchronous.test_state_merging import Keeping
from tfdist_cli.spec.sections.updates import Updates
from tfdist_cli.train.engine.base import DEFAULT_RULES, Rules
from tfdist_cli.train.engine.parameter_server.asynchronous import unrolled
from tfdist_cli.train.engine.parameter_server.asynchronous.unrolled import UnrolledFunctions


class Unused(keras.layers.Layer):
    """Its weight has a gradient that does not depend on the batch, and is too large to cross with others."""

    def build(self, _):
        self.weight = self.add_weight(shape=(1024, 1024), initializer="ones", regularizer="l2")

    def call(self, x):
        return x


def compile_all(functions, count, iterators):
    """Waits until functions are compiled, as a training does."""
    assert not functions.is_ready(count, iterators)
    with functions.training_waits():
        functions._thread.join(60)
    return functions.is_ready(count, iterators)


@pytest.mark.slow
@pytest.mark.parametrize("updates", [Updates(), Updates(push_every=2), Updates(local_steps=2), Updates(prefetch=True)])
def test_what_is_compiled_changes_nothing_and_is_what_the_training_runs(updates, servers, monkeypatch):
    build = lambda: classifier(Keeping(), Unused())  # noqa: E731 called within the scope
    engine, model = local_engine(monkeypatch, servers(2), build, batches().repeat(), Rules(updates=updates))
    list(engine.run(2, first=0, size=2, adapts=True, pause=NoPause()))
    variables = [*model.variables, *model.optimizer.variables]
    before = [variable.numpy() for variable in variables]
    executions = engine._updates._executions
    assert compile_all(executions.compiled, 4, engine._iterators)
    for variable, value in zip(variables, before, strict=True):
        assert (variable.numpy() == value).all(), variable.path
    taken = list(engine.run(40, first=2, size=4, adapts=True, pause=NoPause()))
    assert sum(len(each.losses) for each in taken) == 40
    assert executions.unrolled(4).experimental_get_tracing_count() == 1
    assert int(next(layer for layer in model.layers if isinstance(layer, Keeping)).count) == 42


def functions(trace=lambda: None, *, rounds=3, workers=1, fails=None, runs=lambda: None, rules=DEFAULT_RULES):
    """Functions whose trace calls `trace` in each round, and which each worker calls `runs` for and fails to run."""
    made = []

    def rehearsal(_worker, function, _arguments, _cancellation):
        function()

        def rehearse():
            runs()
            raise fails or tf.errors.FailedPreconditionError(None, None, "there is no batch")

        return rehearse

    def function():
        for _ in range(rounds):
            with made[0].turn():
                trace()

    context = SimpleNamespace(
        workers=[SimpleNamespace(device_name="", _is_dead_with_error=None) for _ in range(workers)],
        coordinator=SimpleNamespace(strategy=tf.distribute.get_strategy()),
        element_spec=tf.TensorSpec([]),
        seeds=SimpleNamespace(numbers=lambda step: [step]),
        rehearsal=rehearsal,
        rules=rules,
    )
    made.append(UnrolledFunctions(context, lambda _count: function))
    return made[0]


@pytest.fixture(autouse=True)
def iterators_of_this_process(monkeypatch):
    monkeypatch.setattr(unrolled, "CHIEF_DEVICE", "")


def test_a_round_is_traced_only_while_the_training_waits(monkeypatch):
    monkeypatch.setattr(unrolled, "_BUSY", float("inf"))
    begun, goes_on = threading.Semaphore(0), threading.Semaphore(0)

    def trace():
        begun.release()
        goes_on.acquire()

    compiled = functions(trace)
    assert not compiled.is_ready(4, None)
    assert not begun.acquire(timeout=0.05)
    for _ in range(3):
        with compiled.training_waits():
            assert begun.acquire(timeout=10)
            goes_on.release()  # the context ends after the round
        assert not begun.acquire(timeout=0.05)
    compiled._thread.join(10)
    assert compiled.is_ready(4, None)


@pytest.mark.parametrize("ends", [False, True])
def test_where_the_processor_is_busy_the_training_waits_for_all_rounds_unless_it_ends(ends):
    first, last = threading.Event(), threading.Event()

    def trace():
        if first.is_set():
            assert last.wait(10)
        threading.Event().wait(0.02)  # other programs have the processor
        first.set()

    compiled = functions(trace, rounds=2)
    assert not compiled.is_ready(4, None)
    threading.Timer(0.3, last.set).start()
    with compiled.training_waits(lambda: ends):
        assert first.wait(10)
        if ends:
            last.set()
    if not ends:
        assert last.is_set()
        compiled._thread.join(10)
        assert compiled.is_ready(4, None)
    compiled.close()


def test_the_training_does_not_wait_long_for_a_worker_that_is_stopped():
    continued = threading.Event()
    compiled = functions(lambda: threading.Event().wait(0.02), runs=lambda: continued.wait(60))
    assert not compiled.is_ready(4, None)
    with compiled.training_waits():
        compiled._thread.join(1)
    assert compiled._hurries
    assert not compiled.is_ready(4, None)
    continued.set()
    compiled._thread.join(10)
    assert compiled.is_ready(4, None)


def test_another_thread_traces_at_any_time():
    compiled = functions()
    with compiled.turn(), compiled.turn():
        pass


@pytest.mark.parametrize(
    ("error", "ready", "lines"),
    [
        (tf.errors.UnavailableError(None, None, "Socket closed"), True, 0),  # the worker compiles it when it is back
        (tf.errors.InvalidArgumentError(None, None, "no kernel"), False, 1),
    ],
)
def test_a_lost_worker_and_a_function_that_does_not_compile(error, ready, lines, log):
    compiled = functions(fails=error, workers=2)
    assert compile_all(compiled, 4, None) is ready
    assert compiled.is_ready(4, None) is ready
    assert len(log) == lines


def test_the_end_of_a_training_ends_the_thread():
    compiled = functions()
    assert not compiled.is_ready(4, None)
    compiled.close()
    assert not compiled._thread.is_alive()
    assert not compiled.is_ready(5, None)


def test_a_training_that_builds_first_waits_for_the_function():
    traced = []
    own = functions(lambda: traced.append(1), rules=Rules(builds_first=True))
    assert own.is_ready(4, None)
    assert len(traced) == 3
    own.close()


def test_another_training_compiles_what_the_one_before_did_not():
    compiled = functions()
    assert compile_all(compiled, 4, None)
    assert not compiled.is_ready(5, None)
    compiled.close()
    assert not compiled.is_ready(6, None)
    compiled.reopen()
    assert compiled.is_ready(4, None)
    assert compile_all(compiled, 5, None)
