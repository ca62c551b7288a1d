"""TensorFlow's eager context: the configuration of the runtime, its server, and its coordination service.

`tf.config` makes a part of it public. The rest is in `tensorflow.python.eager.context`.
"""

from __future__ import annotations

import inspect
import logging
import random
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.failure_handling.failure_handling import PREEMPTION_KEY
from tensorflow.python.eager import context
from tensorflow.python.ops import gen_random_ops

from tfdist_cli.train.tf_compat.patching import replaced

_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 0.2
_ANSWERS = 2
"""How often in a row all workers have to accept connections: a process that is being killed may still accept some."""


def is_initialized() -> bool:
    """Whether TensorFlow has devices already, so that their configuration cannot change any more.

    Seen in TensorFlow 2.21.0: `Context._context_handle`. Reason: `tf.config` tells it only by the error that a change
    raises. Replace with: a public function that does not start the runtime.
    """
    return context.context()._context_handle is not None


def set_config(config: tf.compat.v1.ConfigProto) -> None:
    """Sets the configuration that the context starts with.

    Seen in TensorFlow 2.21.0: `Context._config`. Reason: `tf.config` has neither `disable_thread_spinning` nor a
    fraction of a GPU's memory. Replace with: functions of `tf.config` for both.
    """
    context.context()._config = config


def gpu_options() -> tf.compat.v1.GPUOptions:
    """Returns the GPU options of the context, with what `tf.config` has set.

    Seen in TensorFlow 2.21.0: `Context.config`. Reason: a `tf.distribute.Server` has devices of its own, and does not
    take the settings of `tf.config`. Replace with: a server that does.
    """
    return context.context().config.gpu_options


def await_sigterm_notice(seconds: float) -> bool:
    """Waits until TensorFlow's preemption notifier has told all tasks that one of them received SIGTERM.

    The notifier looks once a second whether its handler was called, and tells the coordination service then.

    Seen in TensorFlow 2.21.0: `Context.get_config_key_value`, and the key that the runtime sets. Reason: the runtime
    installs a handler of SIGTERM while mirrored tasks connect, and calls none that was there before. Replace with: an
    option that leaves the process's handler.

    Returns:
        Whether it has; False after `seconds`, or if there is no coordination service.
    """
    try:
        context.context().get_config_key_value(PREEMPTION_KEY, timeout_in_ms=round(1000 * seconds))
    except tf.errors.OpError:
        return False
    return True


def global_seed() -> int | None:
    """Returns the seed of `tf.random.set_seed`; None if there is none.

    Seen in TensorFlow 2.21.0: `context.global_seed`. Reason: the seed can be set in public, and not be read. Replace
    with: a public function that reads it.
    """
    return context.global_seed()


@contextmanager
def restarted_seeds(seed: int) -> Iterator[Callable[[], bool]]:
    """Makes a number the global seed, if `tf.random.set_seed` was called; afterwards its seeds go on where they were.

    Yields a function that tells whether an operation has got a seed since. Within it, random operations have kernels of
    their own, whose numbers begin anew.

    Seen in TensorFlow 2.21.0: `Context._seed`, `Context._rng`. Reason: see `global_seed_of`. Replace with: a public
    state of these seeds.
    """
    here = context.context()
    with global_seed_of(None if here._seed is None else seed), _own_random_kernels():
        begin = here._rng.getstate()
        yield lambda: here._seed is not None and here._rng.getstate() != begin


@contextmanager
def global_seed_of(seed: int | None) -> Iterator[None]:
    """Makes a number, or None, the global seed; afterwards its seeds go on where they were.

    `tf.random.set_seed` would also drop the kernels of all operations. For that, TensorFlow waits for all functions
    that other threads run, while it holds the interpreter. Functions of workers that wait for this process never end
    then.

    Seen in TensorFlow 2.21.0: `Context._seed`, `Context._rng`, `Context._set_global_seed`. Reason: the place where the
    seeds are cannot be had, and the deadlock above. Replace with: a public state of these seeds, and a `set_seed` that
    releases the interpreter.
    """
    here = context.context()
    before, numbers = here._seed, getattr(here, "_rng", None)

    def set_seed(value: int | None) -> None:
        here._seed, here._rng = value, random.Random(value)  # noqa: S311 as TensorFlow itself

    with replaced(here, {"_set_global_seed": set_seed}):
        set_seed(seed)
        try:
            yield
        finally:
            here._seed, here._rng = before, numbers


_RANDOM_OPERATIONS = {
    "multinomial": 2,
    "parameterized_truncated_normal": 5,
    "random_gamma": 2,
    "random_poisson_v2": 2,
    "random_shuffle": 1,
    "random_standard_normal": 1,
    "random_uniform": 1,
    "random_uniform_int": 3,
    "truncated_normal": 1,
}
"""The operations whose kernels draw from a state that their seeds begin, each with the number of its inputs."""


@contextmanager
def _own_random_kernels() -> Iterator[None]:
    """Within it, an eager random operation does not go on where one with the same seeds was before.

    The kernel of an operation is kept with its state, here and on the device of another task. That of a function is its
    own, so each operation is made a function; those with the same seeds share one, as they share a kernel otherwise.

    Seen in TensorFlow 2.21.0: `ops.gen_random_ops`. Reason: see `global_seed_of`. Replace with: a way to drop the
    kernels of random operations only.
    """
    functions: dict[Any, Any] = {}

    def own(name: str, inputs: int) -> Callable[..., Any]:
        make = getattr(gen_random_ops, name)
        signature = inspect.signature(make)

        def drawn(*args: Any, **kwargs: Any) -> Any:
            if not tf.executing_eagerly():
                return make(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = list(bound.arguments.items())
            tensors = [tf.convert_to_tensor(value) for _, value in given[:inputs]]
            attributes = {key: value for key, value in given[inputs:] if key != "name"}
            key = name, *(tensor.dtype for tensor in tensors), *attributes.values()
            if key not in functions:
                types = [tf.TensorSpec(None, tensor.dtype) for tensor in tensors]
                functions[key] = tf.function(partial(make, **attributes), input_signature=types, autograph=False)
            return functions[key](*tensors)

        return drawn

    with replaced(gen_random_ops, {name: own(name, inputs) for name, inputs in _RANDOM_OPERATIONS.items()}):
        yield


def remote_caller() -> tuple[str, int] | None:
    """Returns this task's role and index while operations are made on a device of another role; else None.

    Seen in TensorFlow 2.21.0: `context.get_server_def`, `Context.device_name`. Reason: a dataset function does not get
    to know on which task its dataset will be made. Replace with: a public function that returns the current device.
    """
    server, device = context.get_server_def(), context.context().device_name
    job = tf.DeviceSpec.from_string(device).job if device else None
    if server is None or job in (None, server.job_name):
        return None
    return server.job_name, server.task_index


def keep_remote_functions() -> None:
    """Leaves functions that this process has dropped registered with the workers.

    TensorFlow's removal waits for every worker while it holds the interpreter. A worker that closes an iterator over a
    generator, whose Python code runs here, waits for the interpreter meanwhile; a stopped worker never answers.

    Seen in TensorFlow 2.21.0: `Context.remove_function`. Reason: the deadlock above. Replace with: a removal that
    releases the interpreter.
    """
    context.context().remove_function = lambda _name: None


def cluster_addresses() -> list[str]:
    """Returns the addresses of the tasks of the cluster that this process drives; none without one.

    Seen in TensorFlow 2.21.0: `Context.get_server_def`. Reason: the strategy of parameter servers publishes no cluster
    resolver. Replace with: `strategy.cluster_resolver.cluster_spec()`.
    """
    definition = context.context().get_server_def()
    return [address for job in definition.cluster.job for address in job.tasks.values()] if definition else []


class RunningCluster:
    """Adds workers to the cluster that this process drives, and removes workers, while others run functions.

    TensorFlow's coordinator updates the cluster, too, when a worker is lost: with the workers of its start, and it
    waits in TensorFlow until the worker is back. Nothing else can be changed meanwhile. So its updates come here, and
    wait outside of TensorFlow.

    Seen in TensorFlow 2.21.0: `Context.update_server_def`, `Context._server_def`. Reason: above. Replace with: a
    strategy whose workers may change.

    Args:
        job: the role of the workers.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._context = context.context()
        self._update = self._context.update_server_def
        self._definition = self._with(self._context.get_server_def(), {})
        self._updates = threading.Lock()
        self._context.update_server_def = self._restore

    def add(self, index: int, address: str, lost: Collection[int]) -> None:
        """Adds a worker.

        Args:
            index: its index.
            address: its address.
            lost: the indices of workers that failed; the coordinator restores them when they are back.

        Raises:
            ConnectionError: it does not answer, or another one.
            tf.errors.OpError: it exits meanwhile.
        """
        definition = self._with(self._definition, {index: address})
        silent = self._silent(definition) - set(lost)
        if silent:
            raise ConnectionError(f"{', '.join(f'{self._job}:{each}' for each in sorted(silent))} does not answer")
        with self._updates:
            try:
                self._update(self._with(definition, dict.fromkeys(lost)))
            except BaseException:
                self._context._server_def = self._definition
                raise
            self._definition = definition

    def remove(self, index: int, lost: Collection[int]) -> None:
        """Removes a worker; arguments as for `add`.

        Raises:
            tf.errors.OpError: another one exits meanwhile; then this one is removed when that one is back.
        """
        self._definition = self._with(self._definition, {index: None})
        if self._silent(self._definition) <= set(lost):
            with self._updates:
                self._update(self._with(self._definition, dict.fromkeys(lost)))

    def _restore(self, _server_def: Any, *_: Any) -> None:
        """Called by the coordinator when a worker is lost: waits until all workers are back."""
        pause, answered = threading.Event(), 0
        while answered < _ANSWERS:
            pause.wait(_RETRY_SECONDS)  # no event announces that a port of another host opens
            answered = 0 if self._silent(self._definition) else answered + 1
        with self._updates:
            self._update(self._definition)

    def _silent(self, definition: Any) -> set[int]:
        """Returns the workers that accept no connection: TensorFlow would wait for them."""
        return {index for index, address in self._tasks(definition).items() if not _accepts(address)}

    def _with(self, definition: Any, changes: Mapping[int, str | None]) -> Any:
        """Returns a definition with other workers: address by index, None to leave one out."""
        made = type(definition)()
        made.CopyFrom(definition)
        made.ClearField("cluster_device_filters")  # they hold from the start, and TensorFlow warns of later ones
        tasks = self._tasks(made)
        for index, address in changes.items():
            if address is not None:
                tasks[index] = address
            elif index in tasks:
                del tasks[index]
        return made

    def _tasks(self, definition: Any) -> Any:
        return next(job.tasks for job in definition.cluster.job if job.name == self._job)


def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


@cache
def running_cluster(job: str) -> RunningCluster:
    """Returns the cluster that this process drives; there is one in a process.

    Seen in TensorFlow 2.21.0, as `RunningCluster`. Reason: the same. Replace with: the same.
    """
    return RunningCluster(job)


def configure_coordination_service(leader: str, jobs: Mapping[str, int], timeout: float) -> None:
    """Configures the coordination service as `MultiWorkerMirroredStrategy` does, with another timeout.

    Seen in TensorFlow 2.21.0: `Context.configure_coordination_service`. Reason: the strategy waits an hour for a task
    that exits just then. Replace with: a timeout among the strategy's arguments.

    Args:
        leader: the device of the task that runs the service, `/job:chief/replica:0/task:0`.
        jobs: the number of tasks of each role.
        timeout: seconds for all tasks to register.
    """
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=leader,
        cluster_register_timeout_in_ms=int(timeout * 1000),
        coordinated_jobs=[
            context.coordination_config_pb2.CoordinatedJob(name=role, num_tasks=count) for role, count in jobs.items()
        ],
    )


def configure_late_collectives(device: str, leader: str) -> None:
    """Configures the collective operations of a runtime that has started; `MultiWorkerMirroredStrategy` refuses it.

    A program may have made tensors and datasets before it joins its cluster. The task gets another name then, and the
    server of the collectives takes this configuration. TensorFlow's warnings about this are of no use to the reader:
    tfdist makes such datasets again, and the server takes the coordination service.

    Seen in TensorFlow 2.21.0: `Context.configure_collective_ops` raises once the runtime has started; it accepts what
    is in these attributes already. Reason: `Context.enable_collective_ops`, which comes next, does work then. Replace
    with: a strategy that can be made at any time.

    Args:
        device: this task, `/job:worker/task:1`.
        leader: the device of the first task, `/job:chief/replica:0/task:0`.
    """
    own = context.context()
    if is_initialized():
        logging.getLogger("absl").addFilter(_is_no_late_start)
        own._collective_leader = leader
        own._collective_scoped_allocator_enabled_ops = ("CollectiveReduce",)
        own._collective_use_nccl_communication = False
        own._collective_device_filters = (device,)


def _is_no_late_start(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not text.startswith(("Enabling collective ops after", "Configuring coordination service type may not"))


def set_shared_value(key: str, value: str) -> None:
    """Stores a value in the coordination service, where every task can read it.

    Seen in TensorFlow 2.21.0: `Context.set_config_key_value`. Reason: the service has no public interface. Replace
    with: one.
    """
    context.context().set_config_key_value(key, value)


def shared_value(key: str, timeout: float) -> str:
    """Waits for a value that a task stores in the coordination service.

    Seen in TensorFlow 2.21.0: `Context.get_config_key_value`. Reason: the service has no public interface. Replace
    with: one.

    Args:
        key: its name.
        timeout: seconds to wait.

    Raises:
        tf.errors.OpError: no task stores it in time.
    """
    return context.context().get_config_key_value(key, int(timeout * 1000))


def answers(task: str, timeout: float) -> bool:
    """Whether a task's collective operations answer.

    Seen in TensorFlow 2.21.0: `Context.check_collective_ops_peer_health`, which holds the interpreter meanwhile.
    Reason: it is the only probe of a peer. Replace with: a public one.

    Args:
        task: its device, `/job:worker/replica:0/task:0`.
        timeout: seconds to wait.
    """
    try:
        context.context().check_collective_ops_peer_health(task, int(timeout * 1000))
    except tf.errors.OpError:
        return False
    return True
