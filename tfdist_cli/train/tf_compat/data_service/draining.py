"""How a data worker stops to take examples, and what it still has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import service_config_pb2
from tensorflow.python.distribute.coordinator.values import deserialize_dataset_from_graph, serialize_dataset_to_graph

from tfdist_cli.train.tf_compat.data import MADE_FROM, call_registered, clock

_MANY = 2**40
_ASK_SECONDS = 0.02
_GONE_MS = 500
_NEVER_MS = 10**9
_DATASET = re.compile(r".*Dataset(V\d+)?")
_CHOICE = "DirectedInterleaveDataset"
_TYPES = ("output_types", "Toutput_types")
"""The attributes by which operations name the types of their dataset's elements."""


def ending_on_request(dataset: tf.data.Dataset, name: str) -> tf.data.Dataset:
    """Lets a process that runs a pipeline end the sources of it, before it takes their next element.

    Every source of the dataset ends when the function that the process has registered as `name` returns True, see
    `register_python`. It is called before an element, and not again within 20 ms. What the source has returned before
    passes through the rest of the pipeline as at any end.

    Each element of a source is chosen by an element of another dataset, which ends with the function. `take_while`
    after the source would not do: it takes an element, and drops it.

    Seen in TensorFlow 2.21.0: `coordinator.values.serialize_dataset_to_graph`, `deserialize_dataset_from_graph`; the
    operations of sources have no input that is a dataset, and name the types and shapes of their elements in
    `output_types` or `Toutput_types`, and `output_shapes`. Reason: a dataset's inputs cannot be replaced. Replace with:
    a public way to drain a worker of `tf.data`'s service.
    """
    graph = _parsed(dataset)
    gate = _parsed(tf.data.Dataset.choose_from_datasets([tf.data.Dataset.range(1)], _open(name)))
    for source in list(_sources(graph)):
        _put_before_readers(graph, gate, source)
    graph.library.MergeFrom(gate.library)
    again = deserialize_dataset_from_graph(tf.constant(graph.SerializeToString()), dataset.element_spec)
    setattr(again, MADE_FROM, dataset)
    return again.with_options(dataset.options())


def _open(name: str) -> tf.data.Dataset:
    """A dataset of zeros that ends once the function returns True.

    It asks at most once in `_ASK_SECONDS`, since a call of Python takes as long as many cheap elements.
    """

    @tf.autograph.experimental.do_not_convert
    def is_open(number: tf.Tensor) -> tf.Tensor:
        return tf.logical_not(tf.reshape(call_registered(name, [number], [tf.bool])[0], []))

    @tf.autograph.experimental.do_not_convert
    def zeros_for_a_while(_: tf.Tensor) -> tf.data.Dataset:
        end = clock() + _ASK_SECONDS
        zero = tf.data.Dataset.from_tensors(tf.constant(0, tf.int64))
        return zero.concatenate(
            zero.repeat().take_while(tf.autograph.experimental.do_not_convert(lambda _: clock() < end))
        )

    return tf.data.Dataset.range(_MANY).take_while(is_open).flat_map(zeros_for_a_while)


def _parsed(dataset: tf.data.Dataset) -> Any:
    return tf.compat.v1.GraphDef.FromString(serialize_dataset_to_graph(dataset).numpy())


def _sources(graph: Any) -> Iterator[Any]:
    """Yields the operations of a graph that make a dataset without another one."""
    datasets = {node.name for node in graph.node if _DATASET.fullmatch(node.op)}
    for node in graph.node:
        if node.name in datasets and not datasets & {_name(each) for each in node.input}:
            yield node


def _put_before_readers(graph: Any, gate: Any, source: Any) -> None:
    """Lets all operations that read a source read a gate before it, which is added to the graph.

    Args:
        graph: the graph with the source.
        gate: the graph of a gate before another source.
        source: the operation.
    """
    (choice,) = (node for node in gate.node if node.op == _CHOICE)
    replaced = _name(choice.input[1])
    added = {node.name: f"gate_of_{source.name}/{node.name}" for node in gate.node if node.op != "_Retval"}
    for node in graph.node:
        for place, each in enumerate(node.input):
            if _name(each) == source.name:
                node.input[place] = added[choice.name]
    for node in gate.node:
        if node.op == "_Retval" or node.name == replaced:
            continue
        copy = graph.node.add()
        copy.CopyFrom(node)
        copy.name = added[node.name]
        copy.input[:] = [source.name if _name(each) == replaced else added[_name(each)] for each in node.input]
        if node.name == choice.name:
            types = next(name for name in _TYPES if name in source.attr)
            copy.attr["output_types"].CopyFrom(source.attr[types])
            copy.attr["output_shapes"].CopyFrom(source.attr["output_shapes"])


def _name(place: str) -> str:
    """The operation in the name of an input."""
    return place.lstrip("^").partition(":")[0]


def running_tasks(server: tf.data.experimental.service.WorkerServer) -> int:
    """Returns how many passes a data worker has a part of that was not read to its end.

    Seen in TensorFlow 2.21.0: `WorkerServer._num_tasks`. Reason: a server does not publish it. Replace with: a public
    method.
    """
    return int(server._num_tasks())


def dispatcher_config(port: int, protocol: str) -> Any:
    """Returns the configuration of a dispatcher that ends passes as soon as nobody reads them any more.

    Otherwise the parts of a pass that a reader has left stay on the data workers, which would never be done with them.
    A reader that is silent still reads: its process may be stopped for a while.

    Seen in TensorFlow 2.21.0: `service_config_pb2.DispatcherConfig` with `gc_dynamic_sharding_jobs` and
    `client_timeout_ms`, which `DispatchServer` takes. Reason: the public `DispatcherConfig` has neither. Replace with:
    the public class, once it has.
    """
    return service_config_pb2.DispatcherConfig(
        port=port,
        protocol=protocol,
        gc_dynamic_sharding_jobs=True,
        job_gc_check_interval_ms=_GONE_MS,
        job_gc_timeout_ms=_GONE_MS,
        client_timeout_ms=_NEVER_MS,
    )
