"""Parameter servers without a cluster: workers and ps are this process, and functions run in threads."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import tensorflow as tf
from tensorflow.python.distribute.coordinator.coordinator_context import with_dispatch_context
from tensorflow.python.distribute.coordinator.remote_value import RemoteValueStatus

from tfdist_cli.train.engine.parameter_server import context, engine, gradient_store
from tfdist_cli.train.engine.parameter_server.asynchronous import executions
from tfdist_cli.train.engine.parameter_server.engine import ParameterServerEngine
from tfdist_cli.train.engine.parameter_server.lockstep import token_queues, updates
from tfdist_cli.train.engine.parameter_server.quorum import functions, queues
from tfdist_cli.train.model.train_step import ModelStep


class LocalResult:
    """The remote value of a function that runs in a thread.

    Args:
        function: the function.
        after: another result: the function runs when it is there.
    """

    def __init__(self, function, after=None):
        self._after = after
        self._status, self._error = RemoteValueStatus.NOT_READY, None
        self._status_available_event = threading.Event()
        threading.Thread(target=self._run, args=(function,), daemon=True).start()

    def _run(self, function):
        if self._after is not None:
            self._after._status_available_event.wait()
            self._after = None
        try:
            self._value = function()
        except Exception as error:  # noqa: BLE001 it is the result
            self._error = error
        self._status = RemoteValueStatus.READY
        self._status_available_event.set()

    @property
    def value(self):
        self._status_available_event.wait()
        if self._error is not None:
            raise self._error
        return self._value

    def fetch(self):
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), self.value)


class LocalWorker:
    """A worker that is this process."""

    device_name = ""
    _is_dead_with_error = None

    def __init__(self, index, strategy=None):
        self.worker_index = index
        self.scope = strategy.scope if strategy else nullcontext

    def create_resource(self, function, args=(), after=None):
        own = [self.own_part(arg) for arg in args]
        if hasattr(function, "get_concrete_function"):  # as TensorFlow does, before the worker has it
            with self.scope(), with_dispatch_context(self):
                function.get_concrete_function(*own)

        def run():
            with self.scope(), with_dispatch_context(self):
                return function(*own)

        return LocalResult(run, after)

    def own_part(self, arg):
        return arg[self.worker_index].value if isinstance(arg, PerWorker) else arg


class PerWorker(list):
    """A remote value of each worker."""


class LocalCoordinator:
    """A `ClusterCoordinator` of such workers, which take turns. Each runs one scheduled function after another."""

    def __init__(self, strategy, workers):
        self.strategy = strategy
        own = [LocalWorker(index, strategy) for index in range(workers)]
        self._cluster = SimpleNamespace(workers=own, schedule=self.schedule)
        self.scheduled = 0
        self._last = dict.fromkeys(range(workers))

    def schedule(self, function, args=(), kwargs=None):
        worker = self._cluster.workers[self.scheduled % len(self._cluster.workers)]
        self.scheduled += 1
        self._last[worker.worker_index] = worker.create_resource(function, args, self._last[worker.worker_index])
        return self._last[worker.worker_index]

    def join(self):
        pass


class Functions:
    """A worker here finds the concrete function itself, which is traced before."""

    def __init__(self, strategy):
        self._strategy = strategy

    def of(self, function, args):
        with self._strategy.scope():
            function.get_concrete_function(*(arg[0].value if isinstance(arg, PerWorker) else arg for arg in args))
        return function


class NoPause:
    """Nobody wants to pause."""

    def wanted(self):
        return False

    def ends(self):
        return False

    def agreed(self):
        return False


def local_engine(monkeypatch, strategy, build, data, rules, *, workers=2):
    """An engine of parameter servers that are this process.

    Args:
        strategy: made by the fixture `servers`.
        build: makes the compiled model.
        data: a dataset of batches.
        rules: the engine's.
    """
    for name in ("clear_failure", "reserve_function_table"):
        monkeypatch.setattr(engine, name, lambda *_: None)
    monkeypatch.setattr(engine, "per_worker_iterators", lambda remotes, *_: PerWorker(remotes.values()))
    for module in (executions, updates):
        monkeypatch.setattr(module, "ConcreteFunctions", Functions)
    for module in (context, engine, gradient_store, functions, queues, token_queues):
        monkeypatch.setattr(module, "CHIEF_DEVICE", "/job:localhost/replica:0/task:0/device:CPU:0")
    with strategy.scope():
        model = build()
        step = ModelStep(model)
        step.build(data.element_spec)
    coordinator = LocalCoordinator(strategy, workers)
    monkeypatch.setattr(tf.distribute.coordinator, "ClusterCoordinator", lambda _: coordinator)
    made = ParameterServerEngine(step, strategy, data.element_spec, rules)
    made.open(lambda shard: data.repeat(), share="copy", step=0, batches=0)
    return made, model
