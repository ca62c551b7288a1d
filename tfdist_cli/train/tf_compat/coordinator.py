"""TensorFlow's `ClusterCoordinator`: its workers, the results that they owe, and its state after a failure."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import tensorflow as tf
from tensorflow.python.distribute.coordinator import cluster_coordinator, coordinator_context, values
from tensorflow.python.distribute.coordinator.remote_value import RemoteValueStatus
from tensorflow.python.eager import cancellation, context, executor

from tfdist_cli.train.tf_compat.data import clock

_FUNCTIONS_PER_WORKER = 8
"""Entries reserved for each worker: more than twice the number that was seen (3 for each worker)."""
log = logging.getLogger("tfdist")


def workers_of(coordinator: Any) -> list[Any]:
    """Returns the coordinator's workers, in order.

    Seen in TensorFlow 2.21.0: `ClusterCoordinator._cluster`. Reason: the coordinator creates a dataset on all workers
    or on none; a shard per worker needs `Worker.create_resource`. Replace with: a public way to run on one worker.
    """
    return list(coordinator._cluster.workers)


def is_dead(worker: Any) -> bool:
    """Whether a worker failed and has not been replaced yet.

    Seen in TensorFlow 2.21.0: `Worker._is_dead_with_error`. Reason: the coordinator does not publish which workers it
    has lost. Replace with: a public property.
    """
    return bool(worker._is_dead_with_error)


def error_of(remote: Any) -> Exception | None:
    """Returns the error of a remote value that failed or was aborted; None otherwise. It does not wait.

    Seen in TensorFlow 2.21.0: `RemoteValueImpl._error`. Reason: `RemoteValue.get` and `fetch` wait, and do not tell
    whose failure they raise. Replace with: a public property.
    """
    return remote._error


def failure_of(remote: Any) -> Exception | None:
    """Returns the error of a function that ran and failed. A function that was aborted with its worker has none.

    Seen in TensorFlow 2.21.0: `RemoteValueImpl._status`. Reason: as for `error_of`. Replace with: a public property.
    """
    return remote._error if remote._status is RemoteValueStatus.READY else None


def is_aborted(remote: Any) -> bool:
    """Whether a remote value was aborted because its worker failed.

    Seen in TensorFlow 2.21.0: `RemoteValueImpl._status`. Reason: as for `error_of`. Replace with: a public property.
    """
    return remote._status is RemoteValueStatus.ABORTED


def wait_for(remote: Any, timeout: float) -> bool:
    """Waits until a remote value is ready or aborted; returns whether it is.

    Seen in TensorFlow 2.21.0: `RemoteValueImpl._status_available_event`. Reason: `RemoteValue.get` takes no timeout.
    Replace with: one that does.

    Args:
        remote: the value.
        timeout: seconds to wait.
    """
    available = remote._status_available_event
    return available.is_set() or (timeout > 0 and available.wait(timeout))


def per_worker_iterators(remotes: Mapping[int, Any], element_spec: Any, most: int = 0) -> Any:
    """Combines iterators, one created on each worker, into an argument of `ClusterCoordinator.schedule`.

    Seen in TensorFlow 2.21.0: `coordinator.values.PerWorkerValues`, `RemoteValueImpl._type_spec`.
    Reason: `create_per_worker_dataset` gives every worker the same function, and no shard.
    Replace with: a dataset function that receives the worker's index.

    Args:
        remotes: the iterators by the workers' indices.
        element_spec: the `tf.TypeSpec`s of a batch.
        most: workers with an index below this may join, see `set_iterator`.
    """
    none = values.RemoteValueImpl(None, tf.data.IteratorSpec(element_spec))
    none._set_error(tf.errors.CancelledError(None, None, "this worker does not train"))
    combined = values.PerWorkerValues([none] * max(most, 1 + max(remotes, default=0)))
    combined._values = list(combined._values)
    for index, remote in remotes.items():
        set_iterator(combined, index, remote)
    return combined


def are_per_worker(iterators: Any) -> bool:
    """Whether each worker has an iterator of its own, as `per_worker_iterators` makes them.

    Seen in TensorFlow 2.21.0: `coordinator.values.PerWorkerValues`. Reason: as for `per_worker_iterators`. Replace
    with: the same.
    """
    return isinstance(iterators, values.PerWorkerValues)


def set_iterator(iterators: Any, index: int, remote: Any) -> None:
    """Sets the iterator of a worker that joins, also for functions that are scheduled already.

    Seen in TensorFlow 2.21.0: `PerWorkerValues._values`. Reason: as for `create_worker`. Replace with: the same.

    Args:
        iterators: what `per_worker_iterators` returned.
        index: the worker's index.
        remote: its iterator.
    """
    remote._type_spec = iterators._values[index]._type_spec
    iterators._values[index] = remote


def concrete_on(worker: Any, function: Any, args: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Returns what the coordinator would call on a worker: the concrete function, and its arguments.

    Seen in TensorFlow 2.21.0: `cluster_coordinator._maybe_as_type_spec`, `_select_worker_slice`,
    `coordinator_context.maybe_get_remote_value`. Reason: the coordinator runs one function after the other on a worker.
    Replace with: a coordinator that compiles functions in advance.

    Args:
        worker: one of its workers.
        function: a `tf.function`.
        args: its arguments, among them what `per_worker_iterators` returned.
    """
    own = cluster_coordinator._select_worker_slice(worker.worker_index, list(args))
    specs = tf.nest.map_structure(cluster_coordinator._maybe_as_type_spec, own)
    given = tf.nest.map_structure(coordinator_context.maybe_get_remote_value, own)
    with as_coordinator_calls(worker):
        return function.get_concrete_function(*specs), given


class ConcreteFunctions:
    """The concrete functions of those `tf.function`s whose arguments have the same types at each call.

    For a `tf.function` the coordinator compares all types again at each call. That took two fifths of the time in which
    the chief scheduled an execution.

    Seen in TensorFlow 2.21.0: `cluster_coordinator._maybe_as_type_spec`, `_select_worker_slice`. Reason: above. Replace
    with: nothing, once the coordinator does so itself.

    Args:
        strategy: in whose scope they are traced.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        self._known: dict[Any, Any] = {}

    def of(self, function: Any, args: Sequence[Any]) -> Any:
        """Returns the concrete function, which is traced at the first call.

        Args:
            function: a `tf.function`.
            args: the arguments of the next call, among them what `per_worker_iterators` returned.
        """
        if function not in self._known:
            own = cluster_coordinator._select_worker_slice(0, list(args))
            specs = tf.nest.map_structure(cluster_coordinator._maybe_as_type_spec, own)
            with self._strategy.scope():
                self._known[function] = function.get_concrete_function(*specs)
        return self._known[function]


def schedule_concrete(coordinator: Any, function: Any, args: Sequence[Any]) -> Any:
    """Schedules a concrete function on any worker; returns its `RemoteValue`.

    `ClusterCoordinator.schedule` enters the strategy's scope, which only a function that is traced there needs.

    Seen in TensorFlow 2.21.0: `Cluster.schedule`. Reason: above. Replace with: `ClusterCoordinator.schedule`, once it
    enters no scope for a concrete function.

    Args:
        coordinator: a `tf.distribute.coordinator.ClusterCoordinator`.
        function: see `ConcreteFunctions`.
        args: its arguments.

    Raises:
        Exception: a function that was scheduled before has failed.
    """
    return coordinator._cluster.schedule(function, args=args, kwargs=None)


@contextmanager
def as_coordinator_calls(worker: Any) -> Iterator[None]:
    """Functions that are called within the context run on a worker, know its index, and delay no other thread.

    All threads share an executor. Whoever stops using it, as the coordinator does after each function, waits for all
    that is running there.

    Seen in TensorFlow 2.21.0: `coordinator_context.with_dispatch_context`, `context.executor_scope`,
    `Executor.__del__`, `Executor.clear_error`. Reason: as for `concrete_on`. Replace with: the same.
    """
    own = executor.new_executor(enable_async=False)
    try:
        with context.executor_scope(own), coordinator_context.with_dispatch_context(worker):
            yield
    finally:
        own.clear_error()  # it has been raised


class Cancellation:
    """Cancels what this task waits for on others.

    Seen in TensorFlow 2.21.0: `cancellation.CancellationManager`. Reason: Python cannot exit while TensorFlow is about
    to return to a thread. Replace with: a public way to cancel a function.
    """

    def __init__(self) -> None:
        self._manager = cancellation.CancellationManager()

    def call(self, function: Any, args: Sequence[Any]) -> Any:
        """Calls a concrete function that may be cancelled (`CancelledError`)."""
        return self._manager.get_cancelable_function(function)(*args)

    def cancel(self) -> None:
        """Cancels all such calls, also later ones."""
        self._manager.start_cancel()


def iterator_without_data(element_spec: Any) -> Any:
    """Returns an iterator on the current device from which no batch can be read (`FailedPreconditionError`).

    Seen in TensorFlow 2.21.0: `IteratorSpec._from_components`. Reason: a function that is called with it is compiled,
    and changes nothing. Replace with: a way to have another task compile a function.

    Args:
        element_spec: the `tf.TypeSpec`s of a batch.
    """
    handle = tf.raw_ops.AnonymousIteratorV3(output_types=[tf.int64], output_shapes=[[]])
    return tf.data.IteratorSpec(element_spec)._from_components([handle])


class _ResultClosure(cluster_coordinator.ResourceClosure):
    """A function of one worker whose result is copied to this task, like that of a function that any worker may run."""

    def execute_on(self, worker: Any) -> None:
        super().execute_on(worker)
        self.maybe_call_with_output_remote_value(lambda remote: remote.get())


def run_for_result(worker: Any, function: Any, args: Sequence[Any]) -> Any:
    """Runs a function on a worker; the worker may leave, or be lost, before its result is fetched.

    The result of `Worker.create_resource` stays on the worker until it is fetched. Here it is copied to this task as
    soon as the function is done, before the worker runs anything else.

    Seen in TensorFlow 2.21.0: `cluster_coordinator.ResourceClosure`, `Closure.maybe_call_with_output_remote_value`,
    `Worker._register_and_schedule_resource_closure`, `Worker._resource_remote_value_refs`. Reason: above. Replace with:
    `ClusterCoordinator.schedule` for one worker.

    Returns:
        The `RemoteValue`; it is aborted if the worker fails before the result is here, see `is_aborted`.
    """
    manager = worker._cluster.resource_cancellation_mgr
    with worker._resource_tracking_lock:  # the coordinator never removes those of values that are gone
        alive = [reference for reference in worker._resource_remote_value_refs if reference() is not None]
        worker._resource_remote_value_refs = alive
    return worker._register_and_schedule_resource_closure(_ResultClosure(function, manager, args=args))


class _JoiningWorker(cluster_coordinator.Worker):
    """A worker that runs only functions of its own until it is admitted."""

    waiting: ClassVar[weakref.WeakSet[_JoiningWorker]] = weakref.WeakSet()
    """Those that have not been admitted."""

    def __init__(self, index: int, device: str, cluster: Any) -> None:
        self._own: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._admission = threading.Lock()
        self._admitted = False
        self.waiting.add(self)
        super().__init__(index, device, cluster)

    def admit(self) -> None:
        """Lets it take what is scheduled on any worker."""
        with self._admission:
            self._admitted = True
            self._own.put(None)
            self.waiting.discard(self)

    def stop(self) -> None:
        super().stop()
        self._own.put(None)

    def _schedule_resource(self, closure: Any) -> None:
        with self._admission:
            if self._admitted:
                super()._schedule_resource(closure)
            else:
                closure.tag = self.worker_index
                self._own.put(closure)

    def _process_queue(self) -> None:
        while (closure := self._own.get()) is not None:
            self._process_resource_closure(closure)
        super()._process_queue()


class _Retirement(cluster_coordinator.ResourceClosure):
    """The last function of a worker: its thread ends, and it releases its iterator."""

    def __init__(self, iterators: Any) -> None:
        self._iterators = iterators
        self.done = threading.Event()

    def execute_on(self, worker: Any) -> None:
        worker.stop()
        _release_iterator(self._iterators, worker.worker_index)
        self.done.set()

    def mark_cancelled(self) -> None:
        """Called in its place if the worker has been stopped before."""
        self.done.set()


def _release_iterator(iterators: Any, index: int) -> None:
    """Drops the iterator of a worker that leaves."""
    if are_per_worker(iterators):
        left = values.RemoteValueImpl(None, iterators._values[index]._type_spec)
        left._set_error(tf.errors.CancelledError(None, None, "this worker has left"))
        iterators._values[index] = left


def create_worker(coordinator: Any, index: int) -> Any:
    """Creates the coordinator's object for a worker that joins a running cluster, see `admit_worker`.

    Seen in TensorFlow 2.21.0: `cluster_coordinator.Worker`, `Worker._process_queue`, `Worker._schedule_resource`.
    Reason: the coordinator's workers are those of its start. Replace with: a coordinator that workers may join.

    Args:
        coordinator: a `tf.distribute.coordinator.ClusterCoordinator`.
        index: the worker's index; the runtime knows the task already.
    """
    return _JoiningWorker(index, f"/job:worker/replica:0/task:{index}", coordinator._cluster)


def admit_worker(coordinator: Any, worker: Any) -> None:
    """Lets a worker that joins take what is scheduled on any worker, after the functions that run on it alone.

    Seen in TensorFlow 2.21.0: `Cluster.workers`. Reason: as for `create_worker`. Replace with: the same.
    """
    coordinator._cluster.workers.append(worker)
    worker.admit()


def retire_worker(coordinator: Any, worker: Any, iterators: Any) -> threading.Event:
    """Schedules nothing on a worker any more; returns an event that is set when its functions are done.

    Seen in TensorFlow 2.21.0: `Cluster.closure_queue`, `ResourceClosure`. Reason: as for `create_worker`; a worker that
    is only stopped cancels the next function that it takes. Replace with: the same.

    Args:
        coordinator: a `tf.distribute.coordinator.ClusterCoordinator`.
        worker: one of its workers.
        iterators: what `per_worker_iterators` returned, or another value.
    """
    retirement = _Retirement(iterators)
    coordinator._cluster.workers.remove(worker)
    coordinator._cluster.closure_queue.put(retirement, tag=worker.worker_index)
    return retirement.done


def stop_workers(strategy: tf.distribute.Strategy) -> list[threading.Thread]:
    """Has a strategy's coordinator call no function of a worker any more, and cancels those that run.

    Python cannot exit while a thread traces a function, or TensorFlow is about to return to one: the process is
    aborted. `Cluster.stop` could wait for a worker that is lost.

    Seen in TensorFlow 2.21.0: `Strategy._cluster_coordinator`, `Cluster.workers`, `Cluster.closure_queue`,
    `Cluster.resource_cancellation_mgr`, the names of the workers' threads. Reason: above; the coordinator's threads are
    daemons that nobody waits for. Replace with: a coordinator that ends them when Python exits.

    Args:
        strategy: a `tf.distribute.ParameterServerStrategy`.

    Returns:
        The threads that end once what they call is done; none of a worker that is lost.
    """
    coordinator = strategy._cluster_coordinator
    if coordinator is None:
        return []
    logging.getLogger("tensorflow").addFilter(_is_not_cancelled)
    workers = [*coordinator._cluster.workers, *_JoiningWorker.waiting]
    for worker in workers:
        worker.stop()
    coordinator._cluster.closure_queue.stop()
    coordinator._cluster.resource_cancellation_mgr.start_cancel()
    names = {f"WorkerClosureProcessingLoop-{worker.worker_index}" for worker in workers if not is_dead(worker)}
    return [thread for thread in threading.enumerate() if thread.name in names]


def _is_not_cancelled(record: logging.LogRecord) -> bool:
    """Returns whether to show a log record: the coordinator logs what was cancelled with the words of an error."""
    return "CancelledError" not in record.getMessage()


def clear_failure(coordinator: Any) -> None:
    """Waits until nothing is scheduled any more, and lets the coordinator continue after a function that failed.

    There is one coordinator for a strategy. The error of one training would be raised in the next one of the same
    process (`ClusterCoordinator.join` raises it once). And a function on several devices that fails cancels the manager
    that it was started with. All later functions of workers share this manager: they would be cancelled at their start.

    Seen in TensorFlow 2.21.0, and since 2.18: `Cluster.resource_cancellation_mgr`, `cancellation.CancellationManager`.
    Reason: above. Replace with: a coordinator that renews the manager itself.

    Args:
        coordinator: a `tf.distribute.coordinator.ClusterCoordinator`.
    """
    try:
        coordinator.join()
    except Exception as error:  # noqa: BLE001 whatever it is, it was raised where that training ran
        log.debug("an earlier training failed: %s", error)
    cluster = coordinator._cluster
    if cluster.resource_cancellation_mgr.is_cancelled:
        cluster.resource_cancellation_mgr = cancellation.CancellationManager()


def reserve_function_table(devices: Sequence[str], workers: int) -> None:
    """Grows this task's table of remote functions before several threads use it.

    A task keeps a table of the functions that it runs on other tasks (`EagerClusterFunctionLibraryRuntime`), and reads
    an entry without the table's lock while it sends a request. When the table grows at that moment, its entries move,
    and the request carries garbage: "Unable to parse request". The coordinator fetches results from all workers at
    once, by a function for each worker and type that enters the table at its first use. The table doubles its size when
    it is full. So entries without effect are added first, by one thread, until what comes later fits.

    Seen in TensorFlow 2.21.0. Reason: above. Replace with: nothing, once the table is read under its lock.

    Args:
        devices: of ps. A worker may be about to be started again, and does not answer meanwhile.
        workers: how many workers there may be in the course of the training.
    """
    size = 1
    while size < _FUNCTIONS_PER_WORKER * workers:
        size *= 2
    for _ in range(size // len(devices) + 1):  # with more than `size` entries the table has room for 2 * `size`
        _register_on(devices)


def _register_on(devices: Sequence[str]) -> None:
    @tf.function(autograph=False)
    def without_effect() -> None:
        for device in devices:
            with tf.device(device):
                clock()  # TensorFlow does not remove it

    without_effect.get_concrete_function()()  # TensorFlow warns of functions that are traced at each call
