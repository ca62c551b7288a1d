"""A coordinator with one worker and one ps, all in this process.

Its private names, its state after a failure, and a second worker that joins it and leaves again.
"""

import json
import os
import socket
import threading

import tensorflow as tf

from tfdist_cli.train.tf_compat.coordinator import (
    Cancellation,
    ConcreteFunctions,
    admit_worker,
    as_coordinator_calls,
    clear_failure,
    concrete_on,
    create_worker,
    failure_of,
    is_dead,
    iterator_without_data,
    per_worker_iterators,
    reserve_function_table,
    retire_worker,
    run_for_result,
    schedule_concrete,
    set_iterator,
    stop_workers,
    workers_of,
)
from tfdist_cli.train.tf_compat.eager_context import RunningCluster, remote_caller, running_cluster


def address():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def coordinator_of_one_worker():
    cluster = {role: [address()] for role in ("chief", "worker", "ps")}
    servers.extend(
        tf.distribute.Server(cluster, job_name=role, task_index=0, protocol="grpc") for role in ("worker", "ps")
    )
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    return tf.distribute.coordinator.ClusterCoordinator(strategy)


@tf.function
def take(iterator):
    return next(iterator)


@tf.function
def fail():
    tf.debugging.Assert(tf.random.uniform([]) < 0, ["never"])
    return tf.constant(0)


servers = []
coordinator = coordinator_of_one_worker()
assert not hasattr(coordinator, "workers"), "the workers are public now"
(worker,) = workers_of(coordinator)
assert not is_dead(worker)
reserve_function_table([worker.device_name], 1)

assert remote_caller() is None
with tf.device(worker.device_name):
    assert remote_caller() == ("chief", 0)

remotes = {0: worker.create_resource(lambda: iter(tf.data.Dataset.range(50)), args=())}
iterators = per_worker_iterators(remotes, tf.TensorSpec([], tf.int64), 3)
assert coordinator.schedule(take, args=(iterators,)).fetch() == 0

failed = coordinator.schedule(fail)
clear_failure(coordinator)
assert failure_of(failed) is not None
cluster = coordinator._cluster
cluster.resource_cancellation_mgr.start_cancel()
clear_failure(coordinator)
assert not cluster.resource_cancellation_mgr.is_cancelled
coordinator.join()
assert coordinator.schedule(take, args=(iterators,)).fetch() == 1

with coordinator.strategy.scope():  # as where it was traced: it is what the coordinator calls
    concrete, own = concrete_on(worker, take, (iterators,))
with tf.device(worker.device_name):
    assert concrete(*own).numpy() == 2
assert take.experimental_get_tracing_count() == 1

functions = ConcreteFunctions(coordinator.strategy)
concrete = functions.of(take, (iterators,))
assert functions.of(take, (iterators,)) is concrete
assert schedule_concrete(coordinator, concrete, (iterators,)).fetch() == 3
assert run_for_result(worker, concrete, (iterators,)).fetch() == 4
assert take.experimental_get_tracing_count() == 1


# A function that has no data is compiled, and what a thread runs there does not delay those who stop using an executor.
@tf.function
def take_with_index(iterator):
    return next(iterator), tf.distribute.coordinator.experimental_get_current_worker_index()


@tf.function
def wait(seconds):
    with tf.control_dependencies([tf.while_loop(lambda *_: tf.timestamp() < seconds, lambda n: [n + 1], [0])[0]]):
        return tf.identity(seconds)


with tf.device(worker.device_name):
    empty = iterator_without_data(tf.TensorSpec([], tf.int64))
assert isinstance(empty, type(iter(tf.data.Dataset.range(1))))
with coordinator.strategy.scope():
    concrete, own = concrete_on(worker, take_with_index, (empty,))
failures = []
with as_coordinator_calls(worker), tf.device(worker.device_name):
    try:
        concrete(*own)
    except tf.errors.FailedPreconditionError as error:
        failures.append(error)
assert len(failures) == 1, "there is no batch"
with_index = [int(each) for each in coordinator.schedule(take_with_index, args=(iterators,)).fetch()]
assert with_index == [5, 0], with_index
assert take_with_index.experimental_get_tracing_count() == 1


def wait_on_worker():
    with as_coordinator_calls(worker), tf.device(worker.device_name):
        wait(end)


end = tf.timestamp() + 3
waiting = threading.Thread(target=wait_on_worker)
waiting.start()
assert coordinator.schedule(take, args=(iterators,)).fetch() == 6
assert coordinator.schedule(take, args=(iterators,)).fetch() == 7
assert tf.timestamp() < end, "the coordinator has waited for another thread"
waiting.join()

# A call on a worker that is cancelled ends at once.
cancellation, ends = Cancellation(), []


def wait_for_a_minute():
    with as_coordinator_calls(worker), tf.device(worker.device_name):
        try:
            cancellation.call(endless, (tf.timestamp() + 60,))
        except tf.errors.CancelledError:
            ends.append("cancelled")


with coordinator.strategy.scope():
    endless = wait.get_concrete_function(tf.TensorSpec([], tf.float64))
waiting = threading.Thread(target=wait_for_a_minute)
waiting.start()
waiting.join(0.5)
cancellation.cancel()
waiting.join(10)
assert ends == ["cancelled"], ends

# A worker with a gap before it joins, runs functions of its own only, then any, and leaves.
where = address()
servers.append(tf.distribute.Server({"worker": ["localhost:1", "localhost:2", where]}, job_name="worker", task_index=2))
running = RunningCluster("worker")
assert running_cluster("worker") is running_cluster("worker")
refused = ""
try:
    running.add(1, address(), [])
except ConnectionError as error:
    refused = str(error)
assert refused == "worker:1 does not answer", refused
running.add(2, where, [])
joining = create_worker(coordinator, 2)
opened = joining.create_resource(lambda: iter(tf.data.Dataset.range(100, 200)), args=())
set_iterator(iterators, 2, opened)
results = [coordinator.schedule(take, args=(iterators,)).fetch() for _ in range(10)]
assert results == list(range(8, 18)), results
with coordinator.strategy.scope():
    alone = [run_for_result(joining, take, (iterators,)) for _ in range(2)]
assert alone[0].fetch() == 100
admit_worker(coordinator, joining)
assert workers_of(coordinator) == [worker, joining]
taken = set()
while not any(number >= 100 for number in taken):
    pending = [coordinator.schedule(take, args=(iterators,)) for _ in range(2)]
    taken |= {int(each.fetch()) for each in pending}

done = retire_worker(coordinator, joining, iterators)
assert done.wait(30)
assert workers_of(coordinator) == [worker]
running.remove(2, [])
assert alone[1].fetch() == 101, "the result was copied before its worker left"
assert coordinator.schedule(take, args=(iterators,)).fetch() < 50
names = [task for job in running._definition.cluster.job if job.name == "worker" for task in job.tasks]
assert names == [0]

# The threads of all workers end, also that of one which has not been admitted.
create_worker(coordinator, 5)
threads = stop_workers(coordinator.strategy)
assert {thread.name[-2:] for thread in threads} >= {"-0", "-5"}, threads
for thread in threads:
    thread.join(30)
assert not any(thread.is_alive() for thread in threads)
print("done", flush=True)
os._exit(0)  # servers cannot be stopped
