"""The messages of `tf.data`'s dispatcher that tfdist reads or changes.

Seen in TensorFlow 2.21.0: `tensorflow/core/data/service/dispatcher.proto` and `common.proto`; TensorFlow installs no
Python code for them. Reason: a dispatcher never forgets a worker. In each pass it waits for one that has left, and so
does whoever reads the pass. Replace with: a public way to remove a worker from a dispatcher.

This module does not import TensorFlow: it is part of a program that has to start at once.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "/tensorflow.data.DispatcherService/"
HEARTBEAT = f"{SERVICE}ClientHeartbeat"
"""A reader's regular question which tasks of a pass there are."""
UPDATE = f"{SERVICE}WorkerUpdate"
"""A worker's message that its tasks are complete."""
WORKERS = f"{SERVICE}GetWorkers"
_SCHEME = "dns:///"
_FIELD = descriptor_pb2.FieldDescriptorProto
_FIELDS: dict[str, dict[str, tuple[int, int, str]]] = {
    "TaskInfo": {"worker_address": (1, _FIELD.TYPE_STRING, ""), "task_id": (2, _FIELD.TYPE_INT64, "")},
    "ClientHeartbeatResponse": {"task_info": (1, _FIELD.TYPE_MESSAGE, "TaskInfo")},
    "TaskProgress": {"task_id": (1, _FIELD.TYPE_INT64, ""), "completed": (2, _FIELD.TYPE_BOOL, "")},
    "WorkerUpdateRequest": {
        "worker_address": (1, _FIELD.TYPE_STRING, ""),
        "updates": (2, _FIELD.TYPE_MESSAGE, "TaskProgress"),
    },
    "WorkerInfo": {"address": (1, _FIELD.TYPE_STRING, "")},
    "GetWorkersResponse": {"workers": (1, _FIELD.TYPE_MESSAGE, "WorkerInfo")},
}
"""The fields that are used: number, type, and the message if it is one. Messages keep the others unchanged."""
_REPEATED = ("task_info", "updates", "workers")


def _messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="tfdist/dispatcher.proto", package="tfdist", syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field, (number, kind, message_type) in fields.items():
            label = _FIELD.LABEL_REPEATED if field in _REPEATED else _FIELD.LABEL_OPTIONAL
            added = message.field.add(name=field, number=number, type=kind, label=label)
            if message_type:
                added.type_name = f".tfdist.{message_type}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tfdist.{name}")) for name in _FIELDS}


_MESSAGES = _messages()


def worker_addresses(response: bytes) -> tuple[str, ...]:
    """Returns the addresses in a response to `WORKERS`, as the workers registered them."""
    return tuple(worker.address for worker in _MESSAGES["GetWorkersResponse"].FromString(response).workers)


@dataclass(frozen=True)
class Tasks:
    """A response to `HEARTBEAT`.

    Args:
        response: the response.
        kept: the ids of its tasks.
        removed: the ids of the tasks that were removed from it, of each worker.
    """

    response: bytes
    kept: frozenset[int]
    removed: Mapping[str, frozenset[int]]


def without_tasks(response: bytes, workers: Container[str], keep: Container[int]) -> Tasks:
    """Removes the tasks of some workers from a response to `HEARTBEAT`.

    Args:
        response: the response.
        workers: the workers' addresses.
        keep: the tasks that stay nevertheless.
    """
    message = _MESSAGES["ClientHeartbeatResponse"].FromString(response)
    removed: dict[str, frozenset[int]] = {}
    kept = []
    for task in message.task_info:
        if task.worker_address in workers and task.task_id not in keep:
            removed[task.worker_address] = removed.get(task.worker_address, frozenset()) | {task.task_id}
        else:
            kept.append(task)
    if removed:
        del message.task_info[:]
        message.task_info.extend(kept)
        response = bytes(message.SerializeToString())
    return Tasks(response, frozenset(task.task_id for task in kept), removed)


def completed(worker: str, tasks: Iterable[int]) -> bytes:
    """Returns the request of `UPDATE` with which a worker reports that its tasks are complete."""
    request = _MESSAGES["WorkerUpdateRequest"](worker_address=worker)
    for task in sorted(tasks):
        request.updates.add(task_id=task, completed=True)
    return bytes(request.SerializeToString())


def service_name(address: str, start: str) -> str:
    """The name under which one process of a data worker registers with the dispatcher.

    Each process has its own one, since a dispatcher takes a worker that comes back for the one that was there before,
    and gives it no examples until the next pass. gRPC ignores what follows the question mark.
    """
    return f"{_SCHEME}{address}?start={start}"


def address_in(name: str) -> str:
    """The address in a data worker's name."""
    return name.removeprefix(_SCHEME).partition("?")[0]
