"""Dataset functions that draw numbers: shards are parts of one order, and the program's own numbers go on."""

import contextlib
import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.train.data.inputs import as_dataset_function
from tfdist_cli.train.data.shard import Shard
from tfdist_cli.train.data.sharding.same_draws import SameDraws

EXAMPLES = np.arange(100)


@pytest.fixture(autouse=True)
def _seed():
    """The tests have their own states of the generators, which a user's program has drawn from."""
    tf.random.set_seed(3)
    random.seed()
    np.random.seed()
    yield
    tf.random.set_seed(None)


def with_numpy():
    return np.random.permutation(EXAMPLES)


def with_python():
    return np.array(random.sample(list(EXAMPLES), len(EXAMPLES)))


def with_keras():
    return np.array(keras.random.shuffle(EXAMPLES))


def with_tensorflow():
    return tf.random.shuffle(EXAMPLES).numpy()


def with_a_dataset():
    return np.array(list(tf.data.Dataset.from_tensor_slices(EXAMPLES).shuffle(100).as_numpy_iterator()))


DRAWING = [with_numpy, with_python, with_keras, with_tensorflow, with_a_dataset]


def shards(permuted, count, name="train"):
    function = SameDraws(lambda shard: permuted()[shard.index :: shard.count], name)
    return [list(map(int, function(Shard(index, count, index)))) for index in range(count)]


@pytest.mark.parametrize("permuted", DRAWING)
def test_shards_divide_the_order_that_each_call_draws(permuted):
    found = shards(permuted, 3)
    assert sorted(itertools.chain(*found)) == list(EXAMPLES)
    assert found[0] != list(EXAMPLES[::3])
    assert shards(permuted, 3) == found  # and so they do in another process


@pytest.mark.parametrize("permuted", DRAWING)
def test_splits_draw_different_numbers(permuted):
    assert shards(permuted, 1, "train") != shards(permuted, 1, "validation")


def test_functions_with_different_names_draw_different_numbers():
    def train(_):
        return with_numpy()

    def test(_):
        return with_numpy()

    assert list(SameDraws(train, "x")(Shard())) != list(SameDraws(test, "x")(Shard()))


def test_workers_that_read_all_data_draw_different_orders():
    function = SameDraws(lambda _: with_numpy(), "train")
    first, second = (list(function(Shard(0, 1, worker))) for worker in range(2))
    assert first != second
    assert sorted(first) == sorted(second)


def test_the_program_s_seed_changes_the_order():
    first = shards(with_numpy, 2)
    tf.random.set_seed(4)
    assert shards(with_numpy, 2) != first


def test_numbers_of_the_program_go_on():
    def numbers():
        return random.random(), np.random.random(), float(keras.random.uniform(())), float(tf.random.uniform(()))

    def seed():
        keras.backend.clear_session()  # before Keras 3.13, a seed leaves the generator of `keras.random` as it is
        keras.utils.set_random_seed(5)

    seed()
    before, *expected = numbers(), numbers(), numbers()
    seed()
    assert numbers() == before
    for permuted in DRAWING:
        shards(permuted, 2)
    assert [numbers(), numbers()] == expected


def test_a_seed_within_the_function_is_its_own():
    def seeded(_):
        keras.utils.set_random_seed(1)
        return with_numpy()

    before = random.getstate()
    function = SameDraws(seeded, "train")
    np.testing.assert_array_equal(function(Shard()), function(Shard(0, 2)))
    assert random.getstate() == before


def together(function):
    """Whether two later calls are in the function at the same time."""
    meeting = threading.Barrier(2)
    met = []

    def called(shard):
        function()
        if shard.step:
            with contextlib.suppress(threading.BrokenBarrierError):
                meeting.wait(0.5)
                met.append(shard.index)

    drawing = SameDraws(called, "train")
    drawing(Shard(0, 2))
    threads = [threading.Thread(target=drawing, args=[Shard(index, 2, index, 1)]) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(met) == [0, 1]


def test_only_functions_that_draw_wait_for_each_other():
    assert together(lambda: EXAMPLES)
    assert not together(with_numpy)


def test_a_function_of_a_program_is_divided():
    function = as_dataset_function(
        lambda shard: tf.data.Dataset.from_tensor_slices(np.random.permutation(EXAMPLES)).shard(
            shard.count, shard.index
        )
    )
    found = [list(function(Shard(index, 2, index)).as_numpy_iterator()) for index in range(2)]
    assert sorted(found[0] + found[1]) == list(EXAMPLES)


def test_calls_in_several_threads_draw_what_one_draws_alone():
    function = SameDraws(lambda shard: with_numpy()[shard.index :: shard.count].tolist(), "train")
    other = SameDraws(lambda shard: with_tensorflow()[shard.index :: shard.count].tolist(), "validation")
    calls = [(each, Shard(index, 4, index)) for index in range(4) for each in (function, other)]
    alone = [each(shard) for each, shard in calls]
    with ThreadPoolExecutor(len(calls)) as pool:
        for _ in range(5):
            assert list(pool.map(lambda call: call[0](call[1]), calls)) == alone
