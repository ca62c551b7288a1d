"""Each pass has each example once, in an order drawn from seed, worker and pass; a resumed run continues exactly."""

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.codes import raises
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.inputs import as_dataset_function
from tfdist_cli.train.data.length import cardinality
from tfdist_cli.train.data.pipeline import Pipeline, repeated
from tfdist_cli.train.data.shard import Shard

UNHURRIED = settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])


ALONE = Shard()


def taken(pipeline, size, shard=ALONE, count=10, examples=None):
    """The first batches of `range(size)`."""
    data = tf.data.Dataset.range(size) if examples is None else examples
    return [list(map(int, batch)) for batch in pipeline.batches(data, shard).take(count).as_numpy_iterator()]


@pytest.mark.slow
@UNHURRIED
@given(
    size=st.integers(1, 23), batch=st.integers(1, 30), shuffle=st.sampled_from([None, 0, 1, 7]), seed=st.integers(0, 9)
)
def test_each_pass_shows_each_example_once(size, batch, shuffle, seed):
    passes = 3
    count = -(-passes * size // batch)
    shown = [number for part in taken(Pipeline(batch, shuffle, seed), size, count=count) for number in part]
    assert len(shown) == count * batch
    for number in range(passes):
        assert sorted(shown[number * size : (number + 1) * size]) == list(range(size))


@pytest.mark.slow
@UNHURRIED
@given(
    size=st.integers(1, 23),
    batch=st.integers(1, 9),
    shuffle=st.sampled_from([None, 0, 3]),
    step=st.integers(0, 40),
    worker=st.integers(0, 3),
)
def test_resuming_at_any_step_gives_the_batches_that_follow(size, batch, shuffle, step, worker):
    pipeline = Pipeline(batch, shuffle, seed=5)
    whole = taken(pipeline, size, Shard(0, 1, worker), count=step + 4)
    assert taken(pipeline, size, Shard(0, 1, worker, step), count=4) == whole[step:]


def test_resuming_data_of_unknown_length():
    def unknown():
        return tf.data.Dataset.range(40).filter(lambda n: n % 2 == 0)

    pipeline = Pipeline(4)
    whole = taken(pipeline, 0, count=12, examples=unknown())
    assert taken(pipeline, 0, Shard(step=9), count=3, examples=unknown()) == whole[9:]


@pytest.mark.parametrize("shuffle", [0, 12])
@pytest.mark.parametrize("repeat", [False, True])
def test_a_generator_that_can_be_read_once_is_read_once_and_ends(shuffle, repeat):
    once = iter(range(12))
    examples = tf.data.Dataset.from_generator(lambda: once, output_signature=tf.TensorSpec([], tf.int64))
    batches = Pipeline(4, shuffle, repeat=repeat).batches(examples, Shard())
    assert sorted(np.ravel(list(batches.as_numpy_iterator()))) == list(range(12))


def test_passes_of_unknown_length_have_orders_of_their_own():
    unknown = tf.data.Dataset.range(12).filter(lambda _: True)
    shown = np.reshape(list(Pipeline(4).batches(unknown, Shard()).take(9).as_numpy_iterator()), (3, 12))
    assert [sorted(one_pass) for one_pass in shown] == [list(range(12))] * 3
    assert len({tuple(one_pass) for one_pass in shown}) == 3


def test_a_shard_of_unknown_length_that_is_empty_ends():
    empty = tf.data.Dataset.range(40).filter(lambda n: n < 0)
    assert taken(Pipeline(4), 0, examples=empty) == []
    assert taken(Pipeline(4), 0, Shard(step=9), examples=empty) == []


def test_a_shard_without_examples_is_an_error():
    part = tf.data.Dataset.range(1).shard(2, 1)
    shard = Shard(1, 2, 1)
    with raises(TrainingError, "empty-shard") as caught:
        Pipeline(1).batches(part, shard)
    assert "worker:1 (shard 1 of 2)" in str(caught.value)
    assert taken(Pipeline(1, repeat=False), 0, shard, examples=part) == []
    with raises(TrainingError, "empty-shard"):
        repeated(lambda shard: part)(shard)


def test_workers_passes_and_seeds_have_their_own_orders():
    size = 12
    orders = {
        (seed, worker, number): tuple(taken(Pipeline(size, seed=seed), size, Shard(0, 1, worker), count=2)[number])
        for seed in (0, 1)
        for worker in (0, 1)
        for number in (0, 1)
    }
    assert len(set(orders.values())) == len(orders)


@pytest.mark.parametrize("global_seed", [None, 1, 2])
def test_the_order_is_independent_of_the_programs_own_seed(global_seed):
    expected = taken(Pipeline(5, seed=3), 12)
    tf.random.set_seed(global_seed) if global_seed else None
    assert taken(Pipeline(5, seed=3), 12) == expected


def test_the_programs_own_random_numbers_are_left_alone():
    def draw(pipeline):
        tf.random.set_seed(4)
        if pipeline:
            taken(Pipeline(5, seed=3), 12)
        return tf.random.uniform([3]).numpy().tolist()

    assert draw(pipeline=True) == draw(pipeline=False)


def test_without_repeat_the_data_ends_with_its_last_full_batch():
    assert taken(Pipeline(5, 0, repeat=False), 12) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert taken(Pipeline(5, 0, repeat=False), 12, Shard(step=2)) == []
    assert taken(Pipeline(5, 0, repeat=False), 12, Shard(step=9)) == []


def test_a_batch_larger_than_the_data_holds_several_passes():
    (batch,) = taken(Pipeline(7), 3, count=1)
    assert Counter(batch[:6]) == Counter([0, 1, 2] * 2)


def test_a_batch_has_a_known_size():
    assert Pipeline(5).batches(tf.data.Dataset.range(9), Shard()).element_spec.shape == (5,)


def test_arrays_are_divided_among_workers():
    x, y = np.arange(70), np.arange(70) * 2
    function = as_dataset_function((x, y), batch_size=8)
    parts = [[(int(a), int(b)) for a, b in function(Shard(n, 3, n)).unbatch()] for n in range(3)]
    assert sorted(pair for part in parts for pair in part) == [(n, 2 * n) for n in range(70)]


def shown(dataset, count):
    return [list(map(int, batch)) for (batch,) in dataset.take(count).as_numpy_iterator()]


def joined(batches):
    return [number for batch in batches for number in batch]


def test_arrays_are_shuffled_anew_for_each_pass_and_worker():
    function = repeated(as_dataset_function((np.arange(20),), batch_size=8, shuffle=True))
    passes = shown(function(Shard()), 6)
    assert [len(batch) for batch in passes] == [8, 8, 4] * 2  # the last one of a pass is as in Keras
    first, second, other = map(joined, (passes[:3], passes[3:], shown(function(Shard(0, 1, 1)), 3)))
    assert sorted(first) == sorted(second) == sorted(other) == list(range(20))
    assert len({tuple(order) for order in (range(20), first, second, other)}) == 4


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("step", [1, 3, 4, 9])
def test_shuffled_arrays_go_on_after_the_steps_done(shuffle, step):
    function = repeated(as_dataset_function((np.arange(20),), batch_size=8, shuffle=shuffle))
    assert shown(function(Shard(step=step)), 4) == shown(function(Shard()), 13)[step : step + 4]


def test_arrays_say_how_many_batches_they_are():
    function = as_dataset_function((np.arange(20),), batch_size=8, shuffle=True)
    assert cardinality(function(Shard())) == 3
    assert sorted(joined(shown(function(Shard()), 3))) == list(range(20))
    assert len(shown(function(Shard(step=2)), 3)) == 1


def test_no_arrays_for_a_worker():
    with raises(TrainingError, "empty-shard"):
        repeated(as_dataset_function((np.arange(1),)))(Shard(1, 2, 1))


def test_arrays_in_dicts_and_lists():
    x = {"a": np.zeros((6, 2)), "b": np.zeros((6, 3))}
    assert set(as_dataset_function((x, np.zeros(6)))(Shard()).element_spec[0]) == {"a", "b"}
    inputs, y = as_dataset_function(([np.zeros((6, 2)), np.zeros((6, 3))], np.zeros(6)))(Shard()).element_spec
    assert [part.shape[1] for part in inputs] == [2, 3]
    assert y.shape.rank == 1


@pytest.mark.parametrize("data", [5, "digits", None, (), (1, 2, 3, 4)])
def test_unsupported_data_is_named(data):
    with raises(TrainingError, "unsupported-data-type") as caught:
        as_dataset_function(data)
    assert type(data).__name__ in str(caught.value)


@pytest.mark.parametrize("unknown_length", [False, True])
@pytest.mark.parametrize("step", [0, 1, 3, 4, 9])
def test_repeated_data_goes_on_after_the_steps_done(step, unknown_length):
    def function(shard):
        whole = tf.data.Dataset.range(7).batch(2)  # 4 batches
        return whole.filter(lambda _: True) if unknown_length else whole

    def some(shard):
        return [list(map(int, batch)) for batch in repeated(function)(shard).take(12).as_numpy_iterator()]

    assert some(Shard(step=step))[: 12 - step] == some(Shard())[step:]
