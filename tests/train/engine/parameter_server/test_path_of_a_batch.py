"""How many modules a reader opens to follow a batch from the iterator to the updated variable."""

import sys
from pathlib import Path

import tensorflow as tf
from tensorflow.python.distribute.coordinator.coordinator_context import with_dispatch_context

import tfdist_cli
from tests.support.compare import batches, classifier
from tests.support.local_coordinator import LocalWorker, NoPause, local_engine
from tfdist_cli.train.engine.base import Rules

ROOT = f"{Path(tfdist_cli.__file__).parent}/"
COMPAT = "train/tf_compat/"
"""Its functions stand for one private name of TensorFlow or Keras each: readers need not open them."""
MAX_ENTERED = 38
"""Modules that run from `Engine.run` to the end of the trace: the path, eight of `tf_compat`, and those of the engine,
its workers, fallback, the update rule, its schedule, unrolled functions, pacing, seeds, unseeded draws, metrics,
losses, classes, lookups, numbers of updates, timers, and the checks of the model."""
PATH = [
    "train/engine/parameter_server/asynchronous/executions.py",
    "train/engine/parameter_server/batches.py",
    "train/data/pipeline.py",
    "train/model/train_step.py",
    "train/model/many_classes/__init__.py",
    "train/engine/parameter_server/transport.py",
    "train/engine/parameter_server/context.py",
    "train/optimizers/apply.py",
    "train/optimizers/registry.py",
    "train/optimizers/kernels.py",
]
"""The modules that a batch crosses in one asynchronous step, in the order in which they are entered."""


def modules_of(operation):
    """The modules on the call stack that created an operation."""
    files = (frame.filename for frame in operation.traceback)
    own = (file.removeprefix(ROOT) for file in files if file.startswith(ROOT))
    return [file for file in own if not file.startswith(COMPAT)]


def path_from(source, target, graph):
    """The operations on any path of data from a type of operation to another one, in the order of their creation."""
    operations = graph.get_operations()
    after, before = set(), {operation for operation in operations if operation.type == target}
    for operation in operations:
        if operation.type == source or any(tensor.op in after for tensor in operation.inputs):
            after.add(operation)
    for operation in reversed(operations):
        if operation in before:
            before.update(tensor.op for tensor in operation.inputs)
    return [operation for operation in operations if operation in after and operation in before]


def test_an_asynchronous_batch_crosses_ten_modules(servers, monkeypatch):
    """The modules that create the operations between the batch and the update of a variable, and their callers."""
    engine, _ = local_engine(monkeypatch, servers(2), classifier, batches(), Rules())
    arguments = iter(batches()), tf.constant(engine._context.seeds.numbers(0), tf.int64)
    with with_dispatch_context(LocalWorker(0)):
        graph = engine._updates._executions.unrolled(1).get_concrete_function(*arguments).graph
    path = path_from("IteratorGetNext", "ResourceApplyAdam", graph)
    assert [path[0].type, path[-1].type] == ["IteratorGetNext", "ResourceApplyAdam"]
    assert list(dict.fromkeys(module for operation in path for module in modules_of(operation))) == PATH


def test_the_modules_that_run_in_a_trace_do_not_become_more(servers, monkeypatch):
    engine, _ = local_engine(monkeypatch, servers(2), classifier, batches(), Rules())
    entered: set[str] = set()

    def record(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            entered.add(frame.f_code.co_filename.removeprefix(ROOT))

    sys.setprofile(record)
    try:
        executions = engine.run(1, first=0, size=1, adapts=False, pause=NoPause())
        assert len(list(executions)) == 1
    finally:
        sys.setprofile(None)
    assert entered > set(PATH)
    assert len(entered) <= MAX_ENTERED
