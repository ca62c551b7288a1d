"""Parameter servers without a cluster: workers and ps are this process, and functions run when they are scheduled."""

from types import SimpleNamespace

import tensorflow as tf
from tensorflow.python.distribute.coordinator.coordinator_context import with_dispatch_context
from tensorflow.python.distribute.coordinator.remote_value import RemoteValueStatus

from tfdist_cli.train.engine.parameter_server import engine
from tfdist_cli.train.engine.parameter_server.engine import ParameterServerEngine
from tfdist_cli.train.model.train_step import ModelStep


class LocalResult:
    """The result of a function that has run."""

    _status, _error = RemoteValueStatus.READY, None

    def __init__(self, value):
        self.value = value

    def fetch(self):
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), self.value)


class LocalWorker:
    """A worker that is this process."""

    device_name = ""
    _is_dead_with_error = None

    def __init__(self, index):
        self.worker_index = index

    def create_resource(self, function, args=()):
        with with_dispatch_context(self):
            return LocalResult(function(*args))


class LocalCoordinator:
    """A `ClusterCoordinator` of such workers, which take turns."""

    def __init__(self, strategy, workers):
        self.strategy = strategy
        self._cluster = SimpleNamespace(workers=[LocalWorker(index) for index in range(workers)])
        self.scheduled = 0

    def schedule(self, function, args=()):
        worker = self._cluster.workers[self.scheduled % len(self._cluster.workers)]
        self.scheduled += 1
        iterators, *others = args
        with self.strategy.scope():
            return worker.create_resource(function, (iterators[worker.worker_index].value, *others))

    def join(self):
        pass


class NoPause:
    """Nobody wants to pause."""

    def wanted(self):
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
        monkeypatch.setattr(engine, name, lambda _: None)
    monkeypatch.setattr(engine, "per_worker_iterators", lambda remotes, _: remotes)
    monkeypatch.setattr(engine, "CHIEF_DEVICE", "")
    with strategy.scope():
        model = build()
        step = ModelStep(model)
        step.build(data.element_spec)
    coordinator = LocalCoordinator(strategy, workers)
    monkeypatch.setattr(tf.distribute.coordinator, "ClusterCoordinator", lambda _: coordinator)
    made = ParameterServerEngine(step, strategy, data.element_spec, rules)
    made.open(lambda shard: data.repeat(), share="copy", step=0, batches=0)
    return made, model
