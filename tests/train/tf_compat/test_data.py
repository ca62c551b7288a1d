"""`tf.data`: what is private is there, and the public way still does not do."""

import inspect
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.data.experimental.ops import data_service_ops
from tensorflow.python.distribute.coordinator import values
from tensorflow.python.framework import config
from tensorflow.python.ops import script_ops

from tests.support.python_data import Rows, fake_torch, generated
from tfdist_cli.train.tf_compat import data

NUMBERS = tf.data.Dataset.range(12)


def test_what_a_pipeline_is_made_of():
    pipeline = tf.data.Dataset.zip((NUMBERS.map(abs), NUMBERS)).batch(3)
    names = [type(part).__name__ for part in data.transformations(pipeline)]
    assert names == ["_BatchDataset", "_ZipDataset", "_MapDataset", "_RangeDataset", "_RangeDataset"]
    assert not hasattr(pipeline, "inputs")


def test_python_code_in_a_pipeline():
    assert not data.calls_python(NUMBERS.map(abs))
    assert data.calls_python(NUMBERS.map(lambda value: tf.py_function(abs, [value], tf.int64)).batch(2))


def test_a_function_that_every_process_registers():
    data.register_python("doubled", lambda value: 2 * value)
    numbers = NUMBERS.map(lambda value: data.call_registered("doubled", [value], [tf.int64])[0])
    assert [int(each) for each in numbers] == [2 * int(each) for each in NUMBERS]
    assert not data.calls_python(numbers)
    data.forget_python("doubled")
    with pytest.raises(tf.errors.InvalidArgumentError):
        data.call_registered("doubled", [tf.constant(1)], [tf.int64])


def test_python_keeps_what_it_knows_of_a_thread_from_one_call_to_the_next():
    calls, local = [], threading.local()

    def note(number):
        local.count = getattr(local, "count", 0) + 1
        calls.append((threading.get_native_id(), local.count))
        return number + 1

    data.register_python("note", note)

    @tf.function(autograph=False)
    def several():
        number = tf.constant(0)
        for _ in range(100):
            (number,) = data.call_registered("note", [number], [tf.int32])
        return number

    assert int(several()) == 100
    threads = {thread for thread, _ in calls}
    assert {max(count for own, count in calls if own == thread) for thread in threads} == {
        sum(own == thread for own, _ in calls) for thread in threads
    }
    data.forget_python("note")


@pytest.mark.parametrize(
    ("result", "dtypes", "expected"),
    [
        (np.float64(0.5), [tf.float64], [0.5]),
        ([np.arange(4)[::2], [1.5]], [tf.int64, tf.float64], [[0, 2], [1.5]]),
        (np.array(["a", "bcd"]), [tf.string], [[b"a", b"bcd"]]),
        ([np.array([b"a\0", b"bcd\0"], object), b"e"], [tf.string, tf.string], [[b"a\0", b"bcd\0"], b"e"]),
    ],
)
def test_results_of_a_registered_function(monkeypatch, result, dtypes, expected):
    data.register_python("result", lambda _: result)
    if tf.string not in dtypes:
        monkeypatch.setattr(script_ops.FuncRegistry, "_convert", None)  # it is slow
    found = data.call_registered("result", [tf.constant(0)], dtypes)
    assert [np.asarray(each).tolist() for each in found] == expected


@pytest.mark.parametrize(
    ("dataset", "counting", "grouping"),
    [
        (NUMBERS.batch(4), None, "batch"),
        (NUMBERS.batch(4, num_parallel_calls=2), None, "batch"),
        (NUMBERS.batch(4, drop_remainder=True), "batch(..., drop_remainder=True)", "batch"),
        (NUMBERS.padded_batch(4, drop_remainder=True), "padded_batch(..., drop_remainder=True)", "padded_batch"),
        (NUMBERS.window(4), "window", "window"),
        (NUMBERS.batch(2).rebatch(3), None, "rebatch"),
        (NUMBERS.shard(2, 0), "shard", None),
        (NUMBERS.shard(1, 0), None, None),
        (NUMBERS.take(2), "take", None),
        (NUMBERS.batch(2).unbatch(), None, None),
    ],
)
def test_transformations_by_the_method_that_makes_them(dataset, counting, grouping):
    assert data.counting_method(dataset) == counting
    assert data.grouping_method(dataset) == grouping


def test_the_size_of_batches():
    assert data.batch_size(NUMBERS.batch(5).prefetch(1).with_options(tf.data.Options())) == 5
    assert data.batch_size(NUMBERS.batch(5, num_parallel_calls=2)) == 5
    assert data.batch_size(NUMBERS.batch(5).map(lambda batch: batch)) is None
    assert data.batch_size(NUMBERS) is None


def test_a_pipeline_is_made_again_from_its_graph():
    options = tf.data.Options()
    options.autotune.enabled = False
    again = data.recreated_on(NUMBERS.map(lambda value: value * 2).with_options(options), "/device:CPU:0")
    assert list(again.as_numpy_iterator()) == list(range(0, 24, 2))
    assert again.options().autotune.enabled is False


def test_a_pipeline_that_calls_python_is_made_again():
    called = NUMBERS.map(lambda value: tf.py_function(abs, [value], tf.int64)).batch(5)
    again = data.recreated_on(called, "/device:CPU:0")
    del called
    assert [list(each) for each in again.as_numpy_iterator()] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]


def test_functions_of_a_graph_do_not_name_the_task_that_made_them():
    called = tf.data.Dataset.from_generator(lambda: iter([0]), output_signature=tf.TensorSpec([], tf.int64))
    graph = values.serialize_dataset_to_graph(called)
    named, unnamed = (
        {node.device for function in parsed.library.function for node in function.node_def}
        for parsed in map(tf.compat.v1.GraphDef.FromString, (graph.numpy(), data._for_any_host(graph).numpy()))
    )
    assert any("/job:" in device for device in named), "TensorFlow has begun to remove it"
    assert not any("/job:" in device for device in unnamed)


@pytest.mark.parametrize(
    ("dataset", "draws", "repeats"),
    [
        (NUMBERS, False, False),
        (NUMBERS.shuffle(3).batch(2), True, False),
        (NUMBERS.shuffle(3, seed=1).map(abs), False, True),
        (NUMBERS.shuffle(3, seed=1).shuffle(3), True, True),
    ],
)
def test_a_shuffle_without_a_seed_draws_an_order(dataset, draws, repeats):
    assert (data.draws_an_order(dataset), data.repeats_an_order(dataset)) == (draws, repeats)


def shuffled(*_, seed=None):
    return NUMBERS.shuffle(3, seed=seed)


def at_random(*_, seed=None):
    return tf.random.uniform([], seed=seed) < 0.5


@pytest.mark.parametrize(
    ("dataset", "draws"),
    [
        (NUMBERS.shuffle(3), False),
        (NUMBERS.flat_map(shuffled).batch(2), True),
        (NUMBERS.flat_map(tf.function(shuffled)), True),
        (NUMBERS.flat_map(lambda _: NUMBERS.flat_map(shuffled)), True),
        (NUMBERS.interleave(lambda _: shuffled().batch(2), num_parallel_calls=2), True),
        (NUMBERS.flat_map(lambda _: shuffled(seed=1)), False),
        (NUMBERS.filter(at_random), True),
        (NUMBERS.filter(lambda _: at_random(seed=1)), False),
        (NUMBERS.take_while(at_random), True),
        (NUMBERS.map(at_random), False),
        (tf.data.Dataset.random().take(3), True),
        (tf.data.Dataset.sample_from_datasets([NUMBERS, NUMBERS]), True),
        (tf.data.Dataset.sample_from_datasets([NUMBERS, NUMBERS], seed=1), False),
    ],
)
def test_draws_without_a_seed_that_cannot_be_given_one(dataset, draws):
    assert data.draws_in_functions(dataset) == draws
    assert not draws or data.in_random_order(dataset)


@pytest.mark.parametrize(
    ("dataset", "drawn"),
    [
        (NUMBERS.shuffle(3).shard(2, 0).batch(2), True),
        (NUMBERS.shuffle(3).map(abs).shard(2, 0), True),
        (NUMBERS.flat_map(shuffled).shard(2, 0), True),
        (NUMBERS.shard(2, 0).shuffle(3), False),
        (NUMBERS.shuffle(3).shard(1, 0), False),
        (NUMBERS.shuffle(3, seed=1).shard(2, 0), False),
    ],
)
def test_a_shard_of_an_order_that_each_task_draws(dataset, drawn):
    assert data.is_sharded_after_a_draw(dataset) == drawn


def read(iterator, count, allow):
    @tf.function(autograph=False)
    def total():
        numbers = []
        for _ in range(count):
            if allow:
                data.allow_many_batches(iterator)
            numbers.append(next(iterator))
        return tf.add_n(numbers)

    return total().numpy()


def test_one_function_reads_many_batches():
    assert read(iter(tf.data.Dataset.range(40)), 40, allow=True) == sum(range(40))
    with pytest.raises(ValueError, match=r"next"):
        read(iter(tf.data.Dataset.range(40)), 40, allow=False)


def test_how_often_a_reader_of_the_service_asks(monkeypatch):
    public = inspect.signature(tf.data.experimental.service.distribute).parameters
    assert "task_refresh_interval_hint_ms" not in public, "the public function takes it now"
    given = {}

    def distribute(sharding, service, **options):
        given.update(options, sharding=sharding, service=service)
        return lambda dataset: dataset

    takes = inspect.signature(data_service_ops._distribute).parameters
    monkeypatch.setattr(data_service_ops, "_distribute", distribute)
    assert data.distributed(NUMBERS, "grpc://host:1", refresh_ms=20, job_name="training") is NUMBERS
    assert given["task_refresh_interval_hint_ms"] == 20
    assert set(given) - {"sharding"} <= set(takes)


def test_data_in_random_order_is_noticed():
    ordered = tf.data.Dataset.range(9)
    assert not data.in_random_order(ordered.map(lambda x: x, num_parallel_calls=2).batch(4))
    assert data.in_random_order(ordered.shuffle(5).batch(4))
    assert data.in_random_order(ordered.map(lambda x: x, num_parallel_calls=2, deterministic=False).batch(4))


def test_arrays_with_weights_as_keras_trains_on_them():
    y = np.array([0, 1, 2])
    x, _, weights = data.packed_arrays(np.zeros((3, 2)), y, None, {1: 4.0})
    assert x.shape == (3, 2)
    assert weights.tolist() == [1.0, 4.0, 1.0]
    _, _, both = data.packed_arrays(np.zeros((3, 2)), {"a": y, "b": y}, np.ones(3), None)
    assert set(both) == {"a", "b"}
    with pytest.raises(ValueError, match="class_weight"):
        data.packed_arrays(y, {"a": y, "b": y}, None, {1: 4.0})


def test_arrays_are_split_at_their_end():
    first, last = data.split_for_validation((np.arange(5), np.arange(5.0), None), 0.4)
    assert [part.tolist() for part in (*first[:2], *last[:2])] == [[0, 1, 2], [0, 1, 2], [3, 4], [3, 4]]
    assert first[2] is last[2] is None


def test_class_weights_of_a_dataset():
    batches = tf.data.Dataset.from_tensors((tf.zeros([3, 2]), tf.constant([0, 1, 2])))
    ((_, _, weights),) = data.with_class_weights(batches, {2: 4.0}).take(1)
    assert weights.numpy().tolist() == [1.0, 1.0, 4.0]


def test_what_keras_makes_of_data_that_python_code_yields(monkeypatch):
    rows, weights = np.zeros((6, 2), np.float32), {1: 4.0}
    spec, length, batches = data.python_batches(Rows(rows, np.arange(6), batch=4), weights)
    assert [part.shape.as_list() for part in spec] == [[None, 2], [None], [None]]
    assert length == 2
    assert [weight.tolist() for _, _, weight in batches()] == [[1, 4, 1, 1], [1, 1]]
    spec, length, batches = data.python_batches(generated(rows, batch=4, passes=1), None)
    assert (len(spec), length) == (1, None)
    assert [len(batch) for (batch,) in batches()] == [4, 2]
    loader = fake_torch(monkeypatch)([rows])
    assert data.is_loader(loader)
    assert not data.is_loader(rows)
    _, length, batches = data.python_batches(loader, None)
    assert (length, [len(batch) for (batch,) in batches()]) == (1, [6])


class Diagonal:
    """What Keras takes for a sparse matrix of SciPy."""

    row = col = np.arange(2)
    data = np.ones(2, np.float32)
    shape, dtype = (2, 2), data.dtype

    def tocoo(self):
        return self


Diagonal.__module__ = "scipy.sparse"


def test_a_generators_batches_are_converted_as_in_keras():
    spec, _, batches = data.python_batches(((Diagonal(), np.zeros(2), None) for _ in range(3)), None)
    assert [type(part) for part in spec] == [tf.SparseTensorSpec, tf.TensorSpec]
    assert [tf.sparse.to_dense(matrix).numpy().tolist() for matrix, _ in batches()] == [[[1, 0], [0, 1]]] * 3


def test_what_only_later_batches_have_is_not_left_out():
    rows = np.zeros(2)
    _, _, batches = data.python_batches(((rows, weights) for weights in (None, None, rows)), None)
    assert [len(batch) for batch in batches()] == [1, 1, 2]


def test_arrays_in_memory():
    x, y = np.arange(6.0), np.arange(6)
    made = tf.data.Dataset.from_tensor_slices({"x": x, "y": y}).shuffle(3).batch(2).map(lambda batch: batch["x"])
    assert [tensor.numpy().tolist() for tensor in data.sliced_arrays(made)] == [x.tolist(), y.tolist()]
    again = data.recreated_on(made, "/device:CPU:0").shard(2, 0)
    assert [tensor.numpy().tolist() for tensor in data.sliced_arrays(again)] == [x.tolist(), y.tolist()]
    assert data.sliced_arrays(tf.data.Dataset.range(3)) == []
    assert data.sliced_arrays(tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]]))) == []


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_clock_is_read_with_deterministic_operations_too(deterministic):
    seconds = tf.function(lambda: data.clock() + 0.0, autograph=False)
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    try:
        before = time.time()
        assert data.is_deterministic() == deterministic
        assert before <= seconds().numpy() <= time.time()
        assert data.clock().shape == []
        if deterministic:
            with pytest.raises(tf.errors.FailedPreconditionError):
                tf.timestamp()
    finally:
        config.disable_op_determinism()
