"""`tf.data`'s datasets and iterators, and Keras's data adapters.

What a pipeline is made of, how one is moved to another task, and what Keras makes of the data that `fit` takes.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters import (
    data_adapter_utils,
    get_data_adapter,
    is_grain_dataset,
    is_torch_dataloader,
)
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.array_slicing import train_validation_split
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import make_class_weight_map_fn
from tensorflow.python.data.experimental.ops import data_service_ops
from tensorflow.python.data.ops.dataset_ops import DatasetV2
from tensorflow.python.distribute.coordinator.values import deserialize_dataset_from_graph, serialize_dataset_to_graph
from tensorflow.python.framework import config
from tensorflow.python.ops import script_ops

_CALLS_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
_IN_EVERY_PROCESS = "tfdist-"
"""The beginning of the names of functions that every process of a cluster knows."""
_CLOCK = "clock"
_registered: dict[str, _Registered] = {}
_SHUFFLES = {"_ShuffleDataset", "_ShuffleAndRepeatDataset"}
_SEEDS = {"ShuffleDatasetV3": (2, 3, 4), "ShuffleAndRepeatDatasetV2": (2, 3, 5)}
"""Which inputs of an operation that shuffles are its two seeds and their generator."""
_WORKER = 1_000_003
"""Lies between the seeds of two workers: a pipeline has fewer shuffles."""
_RANDOM = "_RandomDataset"
_DRAWS = {**_SEEDS, "RandomDataset": (0, 1), "RandomDatasetV2": (0, 1)}
"""Which inputs of an operation that draws an order are its two seeds."""
_CHOOSES = {"_FilterDataset", "_TakeWhileDataset"}
_DRAWS_NUMBERS = {
    "RandomUniform",
    "RandomUniformInt",
    "RandomStandardNormal",
    "TruncatedNormal",
    "RandomShuffle",
    "RandomGamma",
    "RandomPoissonV2",
    "Multinomial",
}
"""Operations with attributes `seed` and `seed2`, both 0 without a seed."""
_IN_ANY_ORDER = "false"
_HERE = "/device:CPU:0"
_WITHOUT_CLUSTER = "localhost"
"""The job of a process that has not joined a cluster."""
_SHARD = "_ShardDataset"
_SLICES = "_TensorSliceDataset"
MADE_FROM = "made_from"
"""The attribute of a dataset that was made again: the original, which keeps its Python functions and its tables."""
_WINDOW = "_WindowDataset"
_GROUP_BY_WINDOW = "_GroupByWindowDataset"
_BATCH = {"_BatchDataset", "_ParallelBatchDataset"}
_PASSES_ON = {"_PrefetchDataset", "_OptionsDataset"}
_COUNTING = {
    "_TakeDataset": "take",
    "_SkipDataset": "skip",
    "_ZipDataset": "zip (or enumerate)",
    "_ScanDataset": "scan",
    "_TakeWhileDataset": "take_while",
    "CacheDataset": "cache",
    _WINDOW: "window",
    _GROUP_BY_WINDOW: "group_by_window (or bucket_by_sequence_length)",
}
_GROUPING = {
    "_BatchDataset": "batch",
    "_ParallelBatchDataset": "batch",
    "_PaddedBatchDataset": "padded_batch",
    "_MapAndBatchDataset": "map_and_batch",
    "_RebatchDataset": "rebatch",
    _WINDOW: _COUNTING[_WINDOW],
    _GROUP_BY_WINDOW: _COUNTING[_GROUP_BY_WINDOW],
}
BATCHING = ("batch", "padded_batch", "map_and_batch", "rebatch")
"""The methods, as `grouping_method` names them, that make batches of examples."""
_UNGROUPING = {"_UnbatchDataset", "_FlatMapDataset", "_InterleaveDataset", "_ParallelInterleaveDataset"}


def transformations(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields a dataset and all datasets that it is made of, the last transformation first.

    Seen in TensorFlow 2.21.0: `DatasetV2._inputs`. Reason: a dataset does not publish its inputs. Replace with: a
    public property.
    """
    yield dataset
    for part in dataset._inputs():
        yield from transformations(part)


def sliced_arrays(dataset: tf.data.Dataset) -> list[tf.Tensor]:
    """Returns the arrays in memory that a dataset takes its elements from, without ragged and sparse ones.

    Those of a dataset that was made again are the arrays of the original.

    Seen in TensorFlow 2.21.0: the class `_TensorSliceDataset`, `_TensorSliceDataset._tensors`. Reason: a dataset does
    not publish its arguments. Replace with: a public property.
    """
    found = []
    for part in transformations(dataset):
        if hasattr(part, MADE_FROM):
            found += sliced_arrays(getattr(part, MADE_FROM))
        elif type(part).__name__ == _SLICES:
            found += [tensor for tensor in part._tensors if tensor.dtype not in (tf.variant, tf.resource)]
    return found


def calls_python(dataset: tf.data.Dataset) -> bool:
    """Whether the pipeline calls back into the Python process that made it.

    Seen in TensorFlow 2.21.0: `DatasetV2._functions`. Reason: a dataset does not publish its functions. Replace with: a
    public property.
    """
    return any(
        node.op in _CALLS_PYTHON and not node.attr["token"].s.startswith(_IN_EVERY_PROCESS.encode())
        for part in transformations(dataset)
        for nodes in _bodies(part)
        for node in nodes
    )


def _bodies(part: Any) -> Iterator[Any]:
    """Yields the operations of each function that one transformation calls."""
    for wrapper in part._functions():
        graph = wrapper.function.graph.as_graph_def()
        yield from (graph.node, *(function.node_def for function in graph.library.function))


def register_python(name: str, function: Callable[..., Any], *, by_pipelines: bool = False) -> None:
    """Makes a function of arrays known to this process, for `call_registered` of any process of the cluster.

    Seen in TensorFlow 2.21.0: `script_ops._py_funcs._funcs`, a dictionary of weak references. Reason:
    `tf.numpy_function` gives a function a name that only its own process knows. Replace with: a public registry.

    Args:
        name: the name.
        function: the function.
        by_pipelines: whether pipelines call it, whose threads end with their iterators. Other functions are called by
            threads that TensorFlow keeps as long as the process lives.
    """
    _registered[name] = registered = _Registered(function, keeps_threads=not by_pipelines)
    script_ops._py_funcs._funcs[f"{_IN_EVERY_PROCESS}{name}"] = registered


def forget_python(name: str) -> None:
    """Removes a function that `register_python` has added. TensorFlow's registry has only a weak reference to it."""
    del _registered[name]


class _Registered(script_ops.EagerFunc):
    """A function of arrays, whose results TensorFlow takes as they are.

    Seen in TensorFlow 2.21.0: `script_ops.FuncRegistry.__call__`, which converts each result of a function, and none of
    an `EagerFunc`. Reason: a conversion takes 15 µs, as it parses NumPy's version, and steps have tens of results.
    Replace with: `tf.numpy_function`'s own class, once `numpy_compat.np_asarray` is fast.

    Args:
        function: the function.
        keeps_threads: whether Python keeps what it knows of a thread that calls it, see `_keep_thread`.
    """

    def __init__(self, function: Callable[..., Any], *, keeps_threads: bool) -> None:
        self._function = function  # what an `EagerFunc` has besides is for tensors
        self._keeps_threads = keeps_threads

    def __call__(self, device: str, token: str, arguments: Sequence[np.ndarray]) -> Any:  # noqa: ARG002 given by TensorFlow
        if self._keeps_threads:
            _keep_thread()
        found = self._function(*arguments)
        return [_array(each) for each in found] if isinstance(found, list | tuple) else _array(found)


_threads = threading.local()


def _keep_thread() -> None:
    """Lets Python keep its state of this thread until the process ends, unless it does already.

    TensorFlow calls `PyGILState_Ensure` before a function, and `PyGILState_Release` after it. Between two calls, Python
    has no state of a thread that it has not started. To make one again, with a stack that is mapped into memory, and to
    free it takes 25 µs. One call of `PyGILState_Ensure` without its counterpart keeps the state.
    """
    if not hasattr(_threads, "kept"):
        _threads.kept = ctypes.pythonapi.PyGILState_Ensure()


def _array(value: Any) -> np.ndarray:
    """Converts a result as TensorFlow does: strings become objects."""
    found = np.asarray(value, order="C")
    converted: np.ndarray = script_ops.FuncRegistry._convert(value) if found.dtype.char in "SU" else found
    return converted


def call_registered(
    name: str, arguments: Sequence[tf.Tensor], dtypes: Sequence[tf.DType], *, stateless: bool = False
) -> list[tf.Tensor]:
    """Calls a function by the name under which the process that runs the operation has registered it.

    Args:
        name: the name.
        arguments: its arguments.
        dtypes: the types of its results.
        stateless: whether calls depend on their arguments alone, and may be made in any order, or left out.

    Returns:
        The results, of unknown shapes.
    """
    operation = tf.raw_ops.PyFuncStateless if stateless else tf.raw_ops.PyFunc
    return operation(input=list(arguments), token=f"{_IN_EVERY_PROCESS}{name}", Tout=list(dtypes))


def is_deterministic() -> bool:
    """Whether operations are deterministic: random ones then fail without a seed, and `tf.timestamp` in any case.

    Seen in TensorFlow 2.21.0: `config.is_op_determinism_enabled`, also by the variable `TF_DETERMINISTIC_OPS`. Reason:
    the setting has no public getter. Replace with: one.
    """
    return bool(config.is_op_determinism_enabled())


def clock() -> tf.Tensor:
    """Returns the seconds since 1970 by the clock of the device, float64; with deterministic operations, too."""
    if not is_deterministic():
        return tf.timestamp()
    (seconds,) = call_registered(_CLOCK, [tf.constant(0)], [tf.float64])
    seconds.set_shape([])
    return seconds


register_python(_CLOCK, lambda _: np.float64(time.time()))


def in_random_order(dataset: tf.data.Dataset) -> bool:
    """Whether the elements come in another order each time, or may do so: they are shuffled, or read as they arrive.

    So do those of a shuffle without a seed within a function.

    Seen in TensorFlow 2.21.0: the classes `_ShuffleDataset`, `_ParallelInterleaveDataset` and `_ParallelMapDataset`,
    and their `_deterministic`. Reason: a dataset does not publish its transformations. Replace with: public properties.
    """
    return any(
        type(part).__name__ in _SHUFFLES or _IN_ANY_ORDER in str(getattr(part, "_deterministic", ""))
        for part in transformations(dataset)
    ) or draws_in_functions(dataset)


def batch_size(dataset: tf.data.Dataset) -> int | None:
    """Returns the number of examples in a batch if `batch` is the pipeline's last transformation.

    Seen in TensorFlow 2.21.0: the classes `_BatchDataset`, `_ParallelBatchDataset`, `_PrefetchDataset` and
    `_OptionsDataset`, and `_BatchDataset._batch_size`. Reason: a dataset does not publish its arguments. Replace with:
    a public property.
    """
    for part in transformations(dataset):
        if type(part).__name__ in _BATCH:
            size = tf.get_static_value(part._batch_size)
            return None if size is None else int(size)
        if type(part).__name__ not in _PASSES_ON:
            return None
    return None


def counting_method(part: Any) -> str | None:
    """Returns the method of `tf.data.Dataset` that made one transformation, if it counts elements; else None.

    Seen in TensorFlow 2.21.0: names of private classes, `_ShardDataset._num_shards`. Reason: a dataset publishes
    neither its transformation nor the arguments. Replace with: public properties.
    """
    name = type(part).__name__
    if name == _SHARD and tf.get_static_value(part._num_shards) != 1:
        return "shard"
    if name in _GROUPING and name != _GROUP_BY_WINDOW and _drops_remainder(part):
        return f"{_GROUPING[name]}(..., drop_remainder=True)"
    return _COUNTING.get(name)


def grouping_method(dataset: tf.data.Dataset) -> str | None:
    """Returns the pipeline's last method that makes one element of several, if nothing after it takes them apart.

    Seen in TensorFlow 2.21.0: names of private classes. Reason: as for `counting_method`. Replace with: public
    properties.
    """
    for part in transformations(dataset):
        name = type(part).__name__
        if name in _UNGROUPING:
            return None
        if name in _GROUPING:
            return _GROUPING[name]
    return None


def _drops_remainder(part: Any) -> bool:
    """TensorFlow keeps a tensor there, or a Python value."""
    name = "_drop_remainder_t" if hasattr(part, "_drop_remainder_t") else "_drop_remainder"
    return bool(tf.get_static_value(tf.convert_to_tensor(getattr(part, name))))


def recreated_on(dataset: tf.data.Dataset, source: str, worker: int = 0) -> tf.data.Dataset:
    """Makes a dataset of this process again, on the current device.

    Seen in TensorFlow 2.21.0: `coordinator.values.serialize_dataset_to_graph`, `deserialize_dataset_from_graph`, and
    the class `_VariantDataset` that the second returns. Reason: a dataset is a value of the process that made it; the
    public `tf.data.experimental.save` writes its elements, not its graph. Replace with: public functions.

    A dataset that is shuffled without a seed gets one: every task shuffles in the same order, anew in each pass.

    Args:
        dataset: one that calls no Python code, unless the current device belongs to this process.
        source: the device that `dataset` is on.
        worker: workers with different numbers shuffle in different orders. That of number 0 follows from the seeds that
            the dataset has.
    """
    with tf.device(source):
        graph, options = _for_any_host(serialize_dataset_to_graph(dataset), worker), dataset.options()
    again = deserialize_dataset_from_graph(graph, dataset.element_spec)
    setattr(again, MADE_FROM, dataset)
    return again.with_options(options)


def draws_an_order(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset is shuffled without a seed: in another order in every process.

    Seen in TensorFlow 2.21.0: the classes in `_SHUFFLES`, `_ShuffleDataset._seed`, `_seed2`. Reason: a dataset does not
    publish its seed. Replace with: a public property.
    """
    return any(not _is_seeded(part) for part in transformations(dataset) if type(part).__name__ in _SHUFFLES)


def repeats_an_order(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset is shuffled with a seed, its own or the global one: in the same order in every process.

    Seen in TensorFlow 2.21.0: the classes in `_SHUFFLES`, `_ShuffleDataset._seed`, `_seed2`. Reason: a dataset does not
    publish its seed. Replace with: a public property.
    """
    return any(_is_seeded(part) for part in transformations(dataset) if type(part).__name__ in _SHUFFLES)


def _is_seeded(shuffle: Any) -> bool:
    return bool(int(shuffle._seed) or int(shuffle._seed2))


def draws_in_functions(dataset: tf.data.Dataset) -> bool:
    """Whether which elements come, or their order, is drawn without a seed where no seed can be set from outside.

    Such are shuffles and `sample_from_datasets` within functions of `flat_map` and `interleave`, random predicates of
    `filter` and `take_while`, and `Dataset.random` anywhere. Numbers that a `map` draws change no order.

    Seen in TensorFlow 2.21.0: `DatasetV2._functions`, the classes `_RandomDataset`, `_FilterDataset` and
    `_TakeWhileDataset`, `_RandomDataset._seed`, `_seed2`. Reason: a dataset publishes neither its functions nor its
    seeds. Replace with: public properties.
    """
    return any(_draws_in_functions(part) for part in transformations(dataset))


def _draws_in_functions(part: Any) -> bool:
    name = type(part).__name__
    if name == _RANDOM and not int(part._seed) and not int(part._seed2):
        return True
    return any(
        _is_unseeded(node, nodes) or (name in _CHOOSES and _draws_numbers(node))
        for nodes in map(list, _bodies(part))
        for node in nodes
    )


def _is_unseeded(node: Any, nodes: list[Any]) -> bool:
    """Whether an operation of a function draws an order, and both of its seeds are the constant 0."""
    if node.op not in _DRAWS:
        return False
    first, second, *_ = (node.input[place].partition(":")[0] for place in _DRAWS[node.op])
    constants = {each.name: each.attr["value"].tensor for each in nodes if each.op == "Const"}
    return all(name in constants and not tf.make_ndarray(constants[name]) for name in (first, second))


def _draws_numbers(node: Any) -> bool:
    return node.op in _DRAWS_NUMBERS and not node.attr["seed"].i and not node.attr["seed2"].i


def is_sharded_after_a_draw(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset is a shard of one that is shuffled without a seed, in an order of its own on each task.

    Seen in TensorFlow 2.21.0: the class `_ShardDataset`, `_ShardDataset._num_shards`. Reason: a dataset publishes
    neither its transformation nor the arguments. Replace with: public properties.
    """
    return any(
        type(part).__name__ == _SHARD
        and tf.get_static_value(part._num_shards) != 1
        and (draws_an_order(part) or draws_in_functions(part))
        for part in transformations(dataset)
    )


def replace_older_datasets(make: Callable[[tf.data.Dataset], tf.data.Dataset]) -> None:
    """Replaces each dataset that is older than the process's place in its cluster by a new one, when it is used.

    A process has another name since it joined its cluster: TensorFlow finds neither the dataset's device nor its
    functions.

    Seen in TensorFlow 2.21.0: `DatasetV2._variant_tensor`, which each use of a dataset reads, `_variant_tensor_attr`,
    and the name of the job of a process without a cluster. Reason: a program may use datasets everywhere. Replace with:
    a runtime whose devices keep their names.

    Args:
        make: makes such a dataset again, on the current device.
    """
    if _job(tf.zeros([])) == _WITHOUT_CLUSTER:
        return
    being_made: set[int] = set()
    lock = threading.RLock()  # a dataset may be used by several threads; the one that makes it again reads the old one

    def is_older(own: Any) -> bool:
        return not tf.is_symbolic_tensor(own) and _job(own) == _WITHOUT_CLUSTER

    def variant(dataset: Any) -> Any:
        key = id(dataset)
        if not is_older(dataset._variant_tensor_attr):
            return dataset._variant_tensor_attr
        with lock:
            if key not in being_made and is_older(dataset._variant_tensor_attr):
                being_made.add(key)
                try:
                    with tf.init_scope(), tf.device(_HERE):
                        dataset._variant_tensor_attr = make(dataset)._variant_tensor_attr
                finally:
                    being_made.remove(key)
            return dataset._variant_tensor_attr

    DatasetV2._variant_tensor = property(variant)


def _job(tensor: tf.Tensor) -> str | None:
    return tf.DeviceSpec.from_string(tensor.device).job


def _for_any_host(graph: tf.Tensor, worker: int = 0) -> tf.Tensor:
    """Returns a serialized graph that has the same result on every task: it names none, and draws no order.

    TensorFlow removes the devices of the graph's nodes, and not those of its functions. A call into Python names the
    task, whose name changes when it joins a cluster.
    """
    parsed = tf.compat.v1.GraphDef.FromString(graph.numpy())
    for node in (node for function in parsed.library.function for node in function.node_def):
        device = tf.DeviceSpec.from_string(node.device)
        own = tf.DeviceSpec(device_type=device.device_type, device_index=device.device_index)
        node.device = own.to_string() if device.device_type else ""
    _seed(parsed, worker)
    return tf.constant(parsed.SerializeToString())


def _seed(graph: tf.compat.v1.GraphDef, worker: int) -> None:
    """Gives the operations that shuffle without a seed one each, the same in every process.

    For other workers than number 0, the seeds of all operations that shuffle are changed by the worker's number.

    The generator of their seeds is a resource of this process, in which it would be found by its name.
    """
    nodes = {node.name: node for node in graph.node}
    for number, node in enumerate((each for each in graph.node if each.op in _SEEDS), 1):
        first, second, generator = (nodes[node.input[place]].attr["value"].tensor for place in _SEEDS[node.op])
        seeds = int(tf.make_ndarray(first)), int(tf.make_ndarray(second))
        if worker or not any(seeds):
            own = _WORKER * worker + (seeds[0] if any(seeds) else number)
            first.CopyFrom(tf.make_tensor_proto(own, tf.int64))
            generator.resource_handle_val[0].name += "/seeded"


def allow_many_batches(iterator: Any) -> None:
    """Lets one `tf.function` read any number of batches.

    Seen in TensorFlow 2.21.0: `OwnedIterator._get_next_call_count`. Reason: TensorFlow takes more than 32 calls in one
    function for a loop that was not compiled, and refuses them. Replace with: an option that raises this limit.
    """
    iterator._get_next_call_count = 0


def distributed(dataset: tf.data.Dataset, service: str, *, refresh_ms: int, **options: Any) -> tf.data.Dataset:
    """Moves a dataset to `tf.data`'s service, with dynamic sharding.

    Seen in TensorFlow 2.21.0: `data_service_ops._distribute`. Reason: the public
    `tf.data.experimental.service.distribute` does not take how often a reader asks whether a pass has ended; its second
    would pass at the end of each. Replace with: the public function, once it takes `task_refresh_interval_hint_ms`.

    Args:
        dataset: the pipeline.
        service: the dispatcher's address, with its protocol.
        refresh_ms: milliseconds between two such questions.
        options: further arguments, as the public function takes them.
    """
    sharding = tf.data.experimental.service.ShardingPolicy.DYNAMIC
    distribute = data_service_ops._distribute(sharding, service, task_refresh_interval_hint_ms=refresh_ms, **options)
    return dataset.apply(distribute)


def packed_arrays(x: Any, y: Any, sample_weight: Any, class_weight: Any) -> tuple[Any, ...]:
    """Returns arrays as Keras trains on them, with the sample weights that follow from the class weights.

    Seen in Keras 3.15.1: `ArrayDataAdapter` and its `_inputs`. Reason: Keras decides there which weights belong to
    which output, and publishes only `fit`. Replace with: a public data adapter.

    Raises:
        ValueError: Keras does not take these weights with these targets.
    """
    packed = ArrayDataAdapter(x, y, sample_weight=sample_weight, class_weight=class_weight)._inputs
    return packed if isinstance(packed, tuple) else (packed,)


def split_for_validation(arrays: tuple[Any, ...], fraction: float) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the first part of arrays, to train on, and the last, to validate with.

    Seen in Keras 3.15.1: `array_slicing.train_validation_split`. Reason: it is what `validation_split` does, and Keras
    publishes only `fit`. Replace with: a public function.

    Raises:
        ValueError: one of the parts would be empty, or Keras cannot slice an array.
    """
    return train_validation_split(arrays, fraction)


def with_class_weights(dataset: tf.data.Dataset, class_weight: Any) -> tf.data.Dataset:
    """Adds to batches the sample weights that follow from the class weights.

    Seen in Keras 3.15.1: `tf_dataset_adapter.make_class_weight_map_fn`. Reason: it is what `class_weight` does to a
    dataset, and Keras publishes only `fit`. Replace with: a public function.

    Raises:
        ValueError: the batches have sample weights, or several targets.
    """
    return dataset.map(make_class_weight_map_fn(class_weight))


def is_loader(data: Any) -> bool:
    """Whether data is a DataLoader of torch, or a dataset of grain.

    Seen in Keras 3.15.1: `data_adapters.is_torch_dataloader` and `is_grain_dataset`. Reason: neither library has to be
    installed, and Keras knows their classes without importing them. Replace with: a public function.
    """
    return bool(is_torch_dataloader(data) or is_grain_dataset(data))


def python_batches(data: Any, class_weight: Any) -> tuple[Any, int | None, Callable[[], Iterator[Any]]]:
    """Returns what Keras makes of data that Python code yields: a generator, a `PyDataset` or a DataLoader.

    Seen in Keras 3.15.1: `data_adapters.get_data_adapter`, `PyDatasetAdapter._get_iterator` and
    `GeneratorDataAdapter.generator`. Reason: Keras publishes only `fit`, and its adapters' datasets cannot continue
    at a later batch. Replace with: public data adapters.

    Returns:
        The `tf.TypeSpec`s of a batch, the number of batches if it is known, and a function that returns the batches of
        one pass. Those of a generator continue after the batches that were read before.

    Raises:
        ValueError: Keras does not take the data.
    """
    try:
        adapter = get_data_adapter(data, class_weight=class_weight)
    except IndexError as error:  # of Keras 3.12: it takes the first of no batches
        raise ValueError("the data has no batches") from error
    spec = adapter.get_tf_dataset().element_spec
    if isinstance(adapter, PyDatasetAdapter):
        return spec, adapter.num_batches, lambda: _py_dataset_batches(adapter)
    if isinstance(adapter, GeneratorDataAdapter):
        given = _without_trailing(spec, lambda part: isinstance(part, tf.OptionalSpec))
        if any(isinstance(part, tf.OptionalSpec) for part in tf.nest.flatten(given)):
            raise ValueError("a batch has None where it has data after it; only the last parts of a batch may be None")
        return given, None, lambda: map(_as_tensorflow_takes_it, adapter.generator())
    return spec, adapter.num_batches, adapter.get_numpy_iterator


def _without_trailing(parts: Any, is_none: Callable[[Any], bool]) -> Any:
    """Returns the first parts of a tuple, without those at its end that are none."""
    while isinstance(parts, tuple) and parts and is_none(parts[-1]):
        parts = parts[:-1]
    return parts


def _as_tensorflow_takes_it(batch: Any) -> Any:
    """Converts a generator's batch as Keras does: sparse matrices become tensors. Parts at its end may be None.

    Seen in Keras 3.15.1: `GeneratorDataAdapter.get_tf_dataset`, `data_adapter_utils.is_scipy_sparse`,
    `scipy_sparse_to_tf_sparse`, `is_jax_sparse` and `jax_sparse_to_tf_sparse`. Reason: what Keras passes to TensorFlow
    is not published, see `python_batches`. Replace with: public data adapters.
    """

    def converted(value: Any) -> Any:
        if data_adapter_utils.is_scipy_sparse(value):
            return data_adapter_utils.scipy_sparse_to_tf_sparse(value)
        if data_adapter_utils.is_jax_sparse(value):
            return data_adapter_utils.jax_sparse_to_tf_sparse(value)
        return value

    return keras.tree.map_structure(converted, _without_trailing(batch, lambda part: part is None))


def _py_dataset_batches(adapter: Any) -> Iterator[Any]:
    adapter.on_epoch_begin()
    yield from adapter._get_iterator()
    adapter.on_epoch_end()
