"""The servers of `tf.data`'s service: the dispatcher, and the data workers."""

from __future__ import annotations

import threading
import uuid
from contextlib import suppress
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TimeoutExceeded
from tfdist_cli.protocol.environment import Environment
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.strategies import may_leave
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.cluster import membership
from tfdist_cli.train.cluster.membership import LEFT
from tfdist_cli.train.cluster.reachability import await_up
from tfdist_cli.train.cluster.rendezvous import port_in_use, wait_until_exited
from tfdist_cli.train.tf_compat.data import register_python
from tfdist_cli.train.tf_compat.data_service.dispatcher import service_name
from tfdist_cli.train.tf_compat.data_service.draining import dispatcher_config, running_tasks

PROTOCOL = "grpc"
DISPATCHER = TaskId("data_dispatcher")
IS_LEAVING = "data-worker-is-leaving"
"""The name of the function that says whether a data worker takes no more examples."""
_HEARTBEAT_MS = 200
"""How often a data worker asks the dispatcher for passes to prepare. It learns of new ones at once; this is for a
message that is lost, and until a worker knows that its part of a pass was read. TensorFlow's default is 30 s."""
_LOOK_SECONDS = 0.02
_kept: list[Any] = []
"""The server of this process. It is never stopped, which may take long if dispatcher or readers do not answer."""
_leaving = threading.Event()


def start_server(environment: Environment) -> None:
    """Starts the server of a data dispatcher or a data worker, which runs as long as the process.

    The process has to exit by `os._exit`, without stopping the server.

    Raises:
        TrainingError: the port is in use.
        TimeoutExceeded: the dispatcher of a data worker did not start in time.
    """
    task = environment.task
    own = environment.addresses[task]
    service = tf.data.experimental.service
    try:
        if task == DISPATCHER:
            one_reader = may_leave(environment.strategy, "data_worker")
            public = service.DispatcherConfig(port=own.port, protocol=PROTOCOL)
            _kept.append(service.DispatchServer(dispatcher_config(own.port, PROTOCOL) if one_reader else public))
            return
        dispatcher = environment.addresses[DISPATCHER]
        await_up({DISPATCHER: dispatcher}, environment.start_timeout)  # TensorFlow would wait an hour for it
        register_python(IS_LEAVING, lambda _: np.array(_leaving.is_set()), by_pipelines=True)
        config = service.WorkerConfig(
            dispatcher_address=str(dispatcher),
            worker_address=service_name(str(own), uuid.uuid4().hex),
            port=own.port,
            protocol=PROTOCOL,
            heartbeat_interval_ms=_HEARTBEAT_MS,
        )
        _kept.append(service.WorkerServer(config))
    except (RuntimeError, tf.errors.OpError) as error:
        if "start gRPC server" not in str(error):
            raise
        raise port_in_use(task, own, "the port is in use") from error


def leave(task: TaskId, own: Address, join_address: Address, *, chief: Address) -> bool:
    """Leaves a training, on a data worker: returns when the chief has read all examples that this task has taken.

    Returns:
        False if the chief does not let it go, or exits before it has read them.
    """
    if not membership.leave(task, own, join_address):
        return False
    _leaving.set()
    if running_tasks(_kept[0]) and not _is_read_by(chief, task):
        return False
    return membership.leave(task, own, join_address, asks=LEFT)


def _is_read_by(chief: Address, task: TaskId) -> bool:
    """Waits until all examples that a data worker has taken are read; returns False if the chief exits before.

    A data worker without a dispatcher never learns that they are. The chief exits then, see `DataWorkers`.
    """
    gone = threading.Event()

    def watch() -> None:
        with suppress(TimeoutExceeded):  # it had exited before
            wait_until_exited(task, chief, timeout=0)
        gone.set()

    threading.Thread(target=watch, name=f"watch-chief-of-{task}", daemon=True).start()
    while running_tasks(_kept[0]):
        if gone.wait(_LOOK_SECONDS):  # TensorFlow does not announce that the tasks have ended
            return False
    return True
