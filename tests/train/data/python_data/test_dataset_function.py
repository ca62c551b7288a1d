"""Data that Python code yields: each batch once, in one order on all tasks, and from the right one on."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.codes import raises
from tests.support.python_data import Rows, fake_torch, generated
from tfdist_cli.errors import TrainingError, UsageError
from tfdist_cli.train.data.inputs import Inputs
from tfdist_cli.train.data.length import cardinality
from tfdist_cli.train.data.pipeline import Consumed, repeated
from tfdist_cli.train.data.python_data import buffered, reading
from tfdist_cli.train.data.python_data.dataset_function import PythonData
from tfdist_cli.train.data.python_data.read_ahead import reads_ahead
from tfdist_cli.train.data.shard import Shard

ROWS = np.arange(20, dtype=np.float32)[:, None]
"""Five batches, of 4 rows."""


def data(given, *, shuffle=False, **more) -> Any:
    return Inputs.of(given, **more).dataset_function(None, shuffle=shuffle)


def numbers(dataset, most=None):
    """The batches by their number: the first row, divided by the size of a batch."""
    return [int(batch[0][0, 0]) // 4 for batch in dataset.take(most or -1)]


@pytest.fixture(params=["PyDataset", "threads", "endless", "DataLoader", "generator"])
def make(request, monkeypatch):
    """Makes data of each kind, always with the same batches."""
    if request.param == "DataLoader":
        loader = fake_torch(monkeypatch)
        monkeypatch.setattr(loader, "batch_size", 4)
        return lambda: loader([ROWS])
    if request.param == "generator":
        return lambda: generated(ROWS, batch=4, passes=3)
    options = {"threads": {"workers": 2}, "endless": {"endless": True}}.get(request.param, {})
    return lambda: Rows(ROWS, batch=4, **options)


@pytest.mark.rotates(5)
@pytest.mark.slow
def test_shares_have_each_batch_once(make):
    shares = [numbers(repeated(data(make()))(Shard(index, 2, index)), 5) for index in range(2)]
    assert shares == [[0, 2, 4, 1, 3], [1, 3, 0, 2, 4]]


@pytest.mark.rotates(5)
@pytest.mark.slow
def test_a_resumed_training_continues_with_the_next_batch(make):
    shares = [numbers(repeated(data(make()))(Shard(index, 2, index, step=3)), 4) for index in range(2)]
    assert shares == [[1, 3, 0, 2], [2, 4, 1, 3]]


@pytest.mark.slow
def test_the_length_of_a_share():
    rows = data(Rows(ROWS, batch=4))
    assert [cardinality(rows(Shard(index, 2, index))) for index in range(2)] == [3, 2]
    assert [numbers(rows(Shard(index, 2, index))) for index in range(2)] == [[0, 2, 4], [1, 3]]
    assert numbers(rows(Shard(5, 6, 5))) == []
    assert cardinality(data(generated(ROWS))(Shard())) is None
    assert int(data(Rows(ROWS, endless=True))(Shard()).cardinality()) == tf.data.INFINITE_CARDINALITY


@pytest.mark.slow
def test_the_shuffled_order_is_the_same_on_all_tasks_and_new_in_each_pass():
    def shares():
        return [numbers(repeated(data(Rows(ROWS, batch=4), shuffle=True))(Shard(n, 2, n)), 5) for n in range(2)]

    (first, second), again = shares(), shares()
    assert [first, second] == again
    whole = [number for pair in zip(first, second, strict=True) for number in pair]
    assert sorted(whole[:5]) == sorted(whole[5:]) == list(range(5))
    assert whole[:5] != whole[5:]


def test_a_dataset_is_told_of_the_ends_of_passes_as_in_keras():
    rows = Rows(ROWS, batch=4, scale=2.0)
    first = [float(batch[0][1, 0]) for batch in repeated(data(rows))(Shard()).take(11)]
    assert first[::5] == [2.0, 4.0, 8.0]  # as in Keras, an epoch also ends before the first one
    assert rows.epochs[:6] == ["end", "begin", "end", "begin", "end", "begin"]
    resumed = Rows(ROWS, batch=4, scale=2.0)
    (batch,) = repeated(data(resumed))(Shard(step=10)).take(1)
    assert float(batch[0][1, 0]) == 8.0


def test_workers_of_one_process_read_a_dataset_once_for_all():
    rows = Rows(ROWS, batch=4)
    function: Any = repeated(data(rows).buffered())
    assert [numbers(function(Shard(index, 2, index, step=5)), 3) for index in range(2)] == [[0, 2, 4], [1, 3, 0]]
    assert rows.epochs[:6] == ["end", "begin", "end", "begin", "end", "begin"]
    assert len(rows.epochs) < 12


def test_class_weights_of_a_dataset():
    rows = Rows(ROWS, np.arange(20), batch=4)
    (batch,) = data(rows, class_weight={2: 3.0})(Shard()).take(1)
    assert batch[2].numpy().tolist() == [1, 1, 3, 1]


@pytest.mark.parametrize(
    ("given", "more"),
    [
        (lambda: generated(ROWS), {"class_weight": {0: 1.0}}),
        (lambda: (row for row in [ROWS]), {}),
        (lambda: generated(ROWS, passes=0), {}),
        (lambda: Rows(ROWS[:0]), {}),
        (lambda: ((rows, None, rows) for (rows,) in generated(ROWS)), {}),
        (lambda: (({"a": rows, "b": None},) for (rows,) in generated(ROWS)), {}),
    ],
    ids=["class weights of a generator", "no tuples", "no batches", "an empty dataset", "no targets", "half the input"],
)
def test_what_keras_does_not_take(given, more):
    with raises(UsageError, "unsupported-python-data"):
        data(given(), **more)


def test_targets_beside_a_generator():
    with raises(UsageError, "targets-given-twice"):
        data(generated(ROWS), y=ROWS)


def test_what_a_failed_execution_has_read_is_read_again():
    function = data(generated(ROWS, batch=4, passes=2))
    assert numbers(function(Shard()), 3) == [0, 1, 2]
    assert numbers(function(Shard()), 3) == [0, 1, 2]
    consumed = Consumed(function)
    consumed.count(2)
    assert numbers(function(Shard(step=2)), 2) == [2, 3]
    assert set(function.source._kept) >= {2, 3}
    assert not {0, 1} & set(function.source._kept)


def test_a_batch_that_is_gone_is_an_error():
    source = data(generated(ROWS, batch=4, passes=2)).source
    assert len(list(source.read(0, 0, 1, repeat=False))) == 10
    source.forget(4)
    assert len(list(source.read(4, 0, 1, repeat=False))) == 6
    with raises(TrainingError, "generator-read-again"):
        next(source.read(3, 0, 1, repeat=False))


def test_a_backup_worker_that_is_behind_skips_what_is_gone():
    function: Any = data(generated(ROWS, batch=4, passes=2)).skipping()
    slow, fast = (function.source.read(0, index, 2, repeat=False) for index in range(2))
    assert int(next(slow)[0][0, 0]) == 0
    assert [int(next(fast)[0][0, 0]) // 4 for _ in range(4)] == [1, 3, 0, 2]
    function.forget(7)
    assert [int(batch[0][0, 0]) // 4 for batch in slow] == [3]


def test_each_reader_gets_the_error_of_a_generator():
    """The first one may have read ahead, and not ask for more."""

    def fails():
        yield from ((ROWS[start : start + 4],) for start in (0, 4, 8))
        raise ZeroDivisionError

    function: Any = data(fails()).buffered()
    read = [function.source.read(0, index, 2, repeat=False) for index in range(2)]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            function.ahead(0, 1, 9)
    for batches in read:
        with pytest.raises(ZeroDivisionError):
            list(batches)


def test_reading_ahead_holds_a_limited_number_of_bytes(monkeypatch):
    monkeypatch.setattr(buffered, "_READ_AHEAD_BYTES", 2 * 4 * 4)  # two batches of four float32
    function: Any = data(generated(ROWS, batch=4)).buffered()
    assert function.ahead(0, 1, 100) == 2
    assert function.ahead(0, 3, 100) == 3
    function.forget(3)
    assert function.ahead(3, 1, 100) == 2


def test_reading_ahead_ends_with_a_generator():
    function: Any = data(generated(ROWS, batch=4, passes=1)).buffered()
    assert reads_ahead(function)
    assert not reads_ahead(data(Rows(ROWS)))
    assert [function.ahead(done, 1, 4) for done in (0, 3, 5, 6)] == [4, 2, 0, 0]
    assert numbers(function(Shard(1, 2, 1))) == [1, 3]


@pytest.mark.parametrize("passes", [1, None])
def test_the_chief_reads_a_dataset_that_calls_python_for_all_workers(passes):
    called = tf.data.Dataset.from_generator(
        lambda: iter([[0], [1], [2]]), output_signature=tf.TensorSpec([1], tf.int64)
    )
    batches = called.map(lambda number: (number, number)).repeat(passes)
    function = Inputs.of(batches, class_weight={0: 0.5, 1: 2.0, 2: 3.0}).dataset_function(
        None, shuffle=False, by_chief=True
    )
    shares = [[int(x[0]) for x, _, _ in function(Shard(index, 2, index)).take(2)] for index in range(2)]
    assert shares == ([[0, 2], [1, 0]] if passes is None else [[0, 2], [1]])
    assert [float(weight[0]) for *_, weight in function(Shard()).take(3)] == [0.5, 2.0, 3.0]
    assert reads_ahead(function) == (passes == 1), "the end of one pass has to be found"


# Made here, before a test sets the seed of the process.
DRAWN = tf.data.Dataset.range(3).flat_map(lambda first: tf.data.Dataset.range(first * 4, first * 4 + 4).shuffle(4))


def test_the_chief_reads_a_dataset_that_draws_its_order_within_a_function():
    function = Inputs.of(DRAWN.batch(2)).dataset_function(None, shuffle=False, by_chief=True)
    assert isinstance(function, PythonData)
    once = function.buffered()
    assert sorted(int(each) for index in range(2) for batch in once(Shard(index, 2, index)) for each in batch) == [
        *range(12)
    ]
    once.close()


def test_evaluations_divide_one_pass_of_data_in_random_order():
    passes = [[3, 1, 2, 0], [0, 2, 1, 3]]
    again = iter(passes)
    called = tf.data.Dataset.from_generator(lambda: iter(next(again)), output_signature=tf.TensorSpec([], tf.int64))
    function = Inputs.of(called.batch(1)).dataset_function(None, shuffle=False, by_chief=True)
    assert isinstance(function, PythonData)
    for order in passes:
        once = function.buffered()
        found = [[int(batch[0]) for batch in once(Shard(index, 2, index))] for index in range(2)]
        assert found == [order[::2], order[1::2]]
        once.close()
        assert list(once(Shard())) == []


def test_a_generator_that_is_evaluated_is_kept():
    function = data(generated(ROWS, batch=4, passes=1))
    assert function.buffered() is function


def test_workers_read_a_dataset_of_tensorflow_operations_themselves():
    batches = tf.data.Dataset.range(3).batch(1)
    assert not isinstance(Inputs.of(batches).dataset_function(None, shuffle=False, by_chief=True), PythonData)


def test_an_evaluation_continues_a_generator():
    function = data(generated(ROWS, batch=4, passes=2))
    assert numbers(function(Shard()), 2) == [0, 1]
    function.advance(2)
    assert numbers(function(Shard(1, 2, 1)), 2) == [3, 0]


def test_reading_ends_when_the_process_exits():
    iterator = iter(data(generated(ROWS, batch=4))(Shard()))
    next(iterator)
    for each in list(reading._open):
        each.end()
    assert len(list(iterator)) <= reading._PREFETCHED + 1
