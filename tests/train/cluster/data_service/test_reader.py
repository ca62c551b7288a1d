"""Reading from data workers: each pass has each example once, however many of them there are."""

import socket
from collections import Counter
from dataclasses import replace
from itertools import zip_longest

import pytest
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import config

from tests.support.codes import raises
from tfdist_cli.errors import TimeoutExceeded, TrainingError, UsageError
from tfdist_cli.protocol.environment import Environment
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.task.data import ExampleSource
from tfdist_cli.train.cluster.data_service.reader import DataService
from tfdist_cli.train.cluster.data_service.server import start_server
from tfdist_cli.train.data.inputs import Inputs
from tfdist_cli.train.data.pipeline import Pipeline
from tfdist_cli.train.data.shard import Shard
from tfdist_cli.train.trainer.fit import BatchSource

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service():
    """A dispatcher and two data workers in this process."""
    module = tf.data.experimental.service
    dispatcher = module.DispatchServer(module.DispatcherConfig(protocol="grpc"))
    workers = [
        module.WorkerServer(module.WorkerConfig(dispatcher._address, protocol="grpc", dispatcher_timeout_ms=1000))
        for _ in range(2)
    ]
    yield DataService(dispatcher._address, workers=2)
    for server in (dispatcher, *workers):  # in this order, none waits for another
        server._stop()


def numbers(size):
    return lambda shard: tf.data.Dataset.range(size).shard(shard.count, shard.index).map(lambda number: number + 0)


def read(dataset, count=-1):
    return [list(map(int, batch)) for batch in dataset.take(count).as_numpy_iterator()]


def flat(batches):
    return [number for batch in batches for number in batch]


@pytest.mark.parametrize("shuffle", [0, None])
def test_each_pass_has_each_example_once(service, shuffle):
    data = service.batches(numbers(48), Pipeline(4, shuffle))(Shard())
    assert data.element_spec.shape == (4,)
    shown = flat(read(data, 36))
    passes = [shown[start : start + 48] for start in (0, 48, 96)]
    assert [sorted(one) for one in passes] == [list(range(48))] * 3
    if shuffle is None:
        assert passes[0] != passes[1] != passes[2]


def test_batches_are_full_and_may_hold_the_end_of_a_pass(service):
    shown = read(service.batches(numbers(10), Pipeline(4))(Shard()), 5)
    assert {len(batch) for batch in shown} == {4}
    assert Counter(flat(shown)) == dict.fromkeys(range(10), 2)


def test_data_that_does_not_repeat_ends(service):
    shown = read(service.batches(numbers(10), Pipeline(4, repeat=False))(Shard()))
    assert [len(batch) for batch in shown] == [4, 4]
    assert len(set(flat(shown))) == 8


def test_a_resumed_run_leaves_out_what_the_pass_had_shown(service):
    shown = flat(read(service.batches(numbers(48), Pipeline(4))(Shard(step=17)), 19))
    assert len(set(shown[:28])) == 28  # 17 = 12 + 5 steps were done: 7 of the second pass are left
    assert sorted(shown[28:]) == list(range(48))


def uncounted(shard):
    """50 numbers in 5 parts, whose number TensorFlow does not know."""
    parts = tf.data.Dataset.range(5).shard(shard.count, shard.index)
    return parts.interleave(lambda part: tf.data.Dataset.range(10 * part, 10 * part + 10))


def test_a_resumed_run_skips_a_part_of_a_pass_whose_length_was_counted(service):
    source = ExampleSource(uncounted, Pipeline(5)).with_lengths({(0, 1): 50})
    shown = flat(read(source.served_batches(service, repeat=True)(Shard(step=17)), 13))
    assert len(set(shown[:15])) == 15  # 17 = 10 + 7 steps were done: 3 of the second pass are left
    assert sorted(shown[15:]) == list(range(50))


def test_a_resumed_run_skips_no_whole_passes_of_batches_that_were_counted(service):
    source = BatchSource(lambda shard: uncounted(shard).batch(8)).with_lengths({(0, 1): 7})
    shown = read(source.served_batches(service, repeat=True)(Shard(step=7 * 10**7 + 6)), 8)
    assert [len(batch) for batch in shown] == [2, 8, 8, 8, 8, 8, 8, 2]
    assert sorted(flat(shown[1:])) == list(range(50))


def test_batches_with_class_weights_are_put_together_again(service):
    batches = tf.data.Dataset.range(50).map(lambda number: (number, number % 8)).shuffle(50).batch(8)
    function = Inputs.of(lambda _: batches, class_weight={7: 2.0})
    source = BatchSource(function.dataset_function(None, shuffle=False))
    shown = list(source.served_batches(service, repeat=False)(Shard()).as_numpy_iterator())
    assert [len(x) for x, _, _ in shown] == [8, 8, 8, 8, 8, 8, 2]
    weights = {int(number): float(weight) for x, _, weights in shown for number, weight in zip(x, weights, strict=True)}
    assert weights == {number: 2.0 if number % 8 == 7 else 1.0 for number in range(50)}


def test_tasks_that_step_together_read_the_same_pass(service):
    shared = replace(service, readers=2, number=7)
    pipeline = Pipeline(4, repeat=False)
    readers = [shared.batches(numbers(48), pipeline)(Shard(worker=worker)) for worker in range(2)]
    steps = list(zip_longest(*(reader.as_numpy_iterator() for reader in readers), fillvalue=[]))
    assert len(steps[0][0]) == len(steps[0][1]) == 4
    shown = Counter(int(number) for step in steps for batch in step for number in batch)
    assert max(shown.values()) == 1
    assert len(shown) >= 48 - 2 * 3  # each reader leaves out its own last batch when that is not full


def test_a_users_own_batches_are_put_together_again(service):
    function = service.whole_batches(lambda shard: numbers(50)(shard).shuffle(50).batch(8), repeat=True)
    shown = read(function(Shard()), 14)
    assert [len(batch) for batch in shown] == [8, 8, 8, 8, 8, 8, 2] * 2
    assert sorted(flat(shown[:7])) == sorted(flat(shown[7:])) == list(range(50))
    assert len(read(function(Shard(step=7 + 4)), 3)[2]) == 2


def test_random_numbers_of_the_data_differ_between_passes_and_the_programs_seed_stays(service):
    tf.random.set_seed(5)
    data = service.whole_batches(
        lambda _: tf.data.Dataset.range(1).map(lambda _: tf.random.uniform([], 0, 2**30, tf.int32)).batch(1),
        repeat=True,
    )(Shard())
    assert len(set(flat(read(data, 3)))) == 3
    assert context.global_seed() == 5


def test_deterministic_operations_keep_the_seed_that_tensorflow_demands(service):
    tf.random.set_seed(5)
    tf.config.experimental.enable_op_determinism()
    try:
        shown = flat(read(service.batches(numbers(48), Pipeline(4))(Shard()), 24))
    finally:
        config.disable_op_determinism()
    assert sorted(shown[:48]) == sorted(shown[48:]) == list(range(48))
    assert shown[:48] != list(range(48))


def environment(strategy="single", **addresses):
    tasks = {TaskId.parse(name.replace("__", ":")): address for name, address in addresses.items()}
    return Environment(strategy, next(iter(tasks)), tasks, start_timeout=0.3)


def test_the_service_of_a_cluster():
    tasks = {"worker__0": Address("a"), "worker__1": Address("b"), "data_dispatcher": Address("c"), "data_worker": "d"}
    mirrored = DataService.of(environment("multi_worker_mirrored", **tasks))
    assert (mirrored.dispatcher, mirrored.workers, mirrored.readers) == (str(Address("c")), 1, 2)
    other = DataService.of(environment("parameter_server", chief=Address("x"), ps=Address("y"), **tasks))
    assert other.readers == 1
    assert other.number > mirrored.number
    more = replace(environment(**tasks), max_data_workers=3)  # so its pipeline must not count elements
    assert DataService.of(more).workers == 3
    with raises(UsageError, "no-data-workers"):
        DataService.of(Environment())


@pytest.mark.parametrize("task", ["data_dispatcher", "data_worker"])
def test_a_port_that_another_program_has(task, service):
    with socket.create_server(("0.0.0.0", 0)) as taken:
        own = Address("127.0.0.1", taken.getsockname()[1])
        where = environment(
            **{task: own, "data_dispatcher": own if "worker" not in task else Address.parse(service.dispatcher)}
        )
        with raises(TrainingError, "port-in-use") as caught:
            start_server(where)
    assert f"{task}:0 " in caught.value.message
    assert str(own) in caught.value.message


def test_a_dispatcher_that_never_comes():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = Address("127.0.0.1", closed.getsockname()[1])
    with raises(TimeoutExceeded, "start-timeout") as caught:
        start_server(environment(data_worker=nobody, data_dispatcher=nobody))
    assert f"data_dispatcher:0 at {nobody} (connection refused)" in caught.value.message
