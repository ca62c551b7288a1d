"""Predictions by the workers of parameter servers, which the chief collects in order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.spec.sections.updates import EmbeddingRule
from tfdist_cli.train.cluster.join import ClusterContext
from tfdist_cli.train.engine.parameter_server.context import Stream, raise_cause
from tfdist_cli.train.engine.parameter_server.transport import Transport
from tfdist_cli.train.engine.parameter_server.workers import Workers
from tfdist_cli.train.model.compute_device import DeviceScope, worker_device_scope
from tfdist_cli.train.model.train_step import Tensors
from tfdist_cli.train.prediction.function import Leaves, PredictionFunction
from tfdist_cli.train.prediction.groups import Groups
from tfdist_cli.train.prediction.reuse import last_or_new
from tfdist_cli.train.tf_compat.coordinator import clear_failure, reserve_function_table, workers_of
from tfdist_cli.train.tf_compat.data import calls_python
from tfdist_cli.train.tf_compat.distribute import ps_devices

_kept_open: list[Any] = []
"""Iterators over data that calls Python code of this process: a worker that closes one early may wait for it."""


def predict_on_workers(context: ClusterContext, model: keras.Model, groups: Groups) -> tuple[Any, Iterator[Leaves]]:
    """Predicts groups; see `predict_groups`."""
    coordinator = tf.distribute.coordinator.ClusterCoordinator(context.strategy)
    clear_failure(coordinator)
    workers = Workers(coordinator, context.joins.membership if context.joins else None)
    reserve_function_table(ps_devices(context.strategy), workers.most)
    with context.strategy.scope():
        inputs = groups.input_spec
        device_scope = worker_device_scope()
        read = partial(_read, device_scope)
        make = partial(PredictionFunction, model, inputs, EmbeddingRule().min_bytes, device_scope, read)
        function = last_or_new(model, inputs, [context.strategy, *workers_of(coordinator)], make)
        predict = function.compiled.get_concrete_function()
    streams = [Stream(workers, place, partial(_opened, groups, place), predict) for place in range(groups.count)]
    return function.outputs, map(function.leaves, _collected(streams, groups.size))


def _read(device_scope: DeviceScope, variables: Sequence[keras.Variable]) -> Tensors:
    """Reads variables: the small ones of a ps cross together."""
    return Transport(variables, device_scope=device_scope).pull().values


def _collected(streams: Sequence[Stream], size: int) -> Iterator[list[np.ndarray]]:
    """Yields the groups in order: stream s of n has groups s, s + n, s + 2·n … Each worker predicts one ahead."""
    most = tf.constant(size, tf.int64)
    try:
        for group, stream in enumerate(streams):
            stream.begin(group, most)
        for group in itertools.count():
            stream = streams[group % len(streams)]
            batches, *leaves = stream.take()
            if not int(batches):
                return
            stream.begin(group + len(streams), most)
            yield [np.asarray(leaf) for leaf in leaves]
    except Exception as error:  # noqa: BLE001 it is raised again, or its cause
        raise_cause(error)


def _opened(groups: Groups, place: int, first: int) -> Any:
    """Opens the groups of a stream, from group `first`."""
    dataset = groups.batches(place, first)
    iterator = iter(dataset)
    if calls_python(dataset):
        _kept_open.append(iterator)
    return iterator
