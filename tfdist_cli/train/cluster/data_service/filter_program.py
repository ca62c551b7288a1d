"""A program between the chief and the dispatcher that leaves out the data workers that have left.

`python -m tfdist_cli.train.cluster.data_service.filter_program DISPATCHER SOCKET`

It passes what the chief asks the dispatcher to it, through a Unix socket: a few small messages, 50 a second at most.
The batches themselves do not pass here. From the answers it removes the tasks of data workers that have left, and
reports these tasks to the dispatcher as complete, so that the dispatcher does not wait for them either.

Each line of its standard input is the address of a data worker that is leaving: its tasks of passes that the chief reads
already stay. It answers with an empty line. It is a process of its own because TensorFlow calls the dispatcher while it
holds Python's lock. It exits with its standard input.
"""

from __future__ import annotations

import sys
import threading
from concurrent import futures

import grpc

from tfdist_cli.train.tf_compat.data_service.dispatcher import (
    HEARTBEAT,
    UPDATE,
    WORKERS,
    completed,
    without_tasks,
    worker_addresses,
)

_SCHEME = "dns:///"
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
]


def service_name(address: str, start: str) -> str:
    """The name under which one process of a data worker registers with the dispatcher.

    Each process has its own one, since a dispatcher takes a worker that comes back for the one that was there before,
    and gives it no examples until the next pass. gRPC ignores what follows the question mark.
    """
    return f"{_SCHEME}{address}?start={start}"


def address_in(name: str) -> str:
    """The address in a data worker's name."""
    return name.removeprefix(_SCHEME).partition("?")[0]


class Filter(grpc.GenericRpcHandler):
    """Passes calls to a dispatcher.

    Args:
        dispatcher: the dispatcher's address.
    """

    def __init__(self, dispatcher: str) -> None:
        self._channel = grpc.insecure_channel(dispatcher, options=_OPTIONS)
        self._left: set[str] = set()
        self._completed: set[int] = set()
        self._lock = threading.Lock()

    def remove(self, address: str) -> None:
        """Leaves out the data worker at this address, whose tasks are complete."""
        left = {name for name in worker_addresses(self._call(WORKERS, b"")) if address_in(name) == address}
        with self._lock:
            self._left |= left

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """Returns what answers a call; its messages stay bytes."""
        method = handler_call_details.method

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                response = self._call(method, request)
                return self._without_those_that_left(response) if method == HEARTBEAT else response
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())
                raise

        return grpc.unary_unary_rpc_method_handler(answer)

    def _call(self, method: str, request: bytes) -> bytes:
        return bytes(self._channel.unary_unary(method)(request))

    def _without_those_that_left(self, response: bytes) -> bytes:
        with self._lock:
            response, removed = without_tasks(response, self._left)
            for worker, tasks in removed.items():
                new = [task for task in tasks if task not in self._completed]
                if new:
                    self._call(UPDATE, completed(worker, new))
                    self._completed.update(new)
        return response


def main(dispatcher: str, socket: str) -> None:
    """Serves until the standard input ends."""
    handler = Filter(dispatcher)
    server = grpc.server(futures.ThreadPoolExecutor(4), handlers=(handler,), options=_OPTIONS)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    sys.stdout.write("\n")
    sys.stdout.flush()
    for line in sys.stdin:
        handler.remove(line.strip())
        sys.stdout.write("\n")
        sys.stdout.flush()
    server.stop(None)


if __name__ == "__main__":
    main(*sys.argv[1:])
