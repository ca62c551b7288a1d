"""A program between the chief and the dispatcher that leaves out the data workers that have left.

`python -m tfdist_cli.train.cluster.data_service.filter_program DISPATCHER`

It passes what the chief asks the dispatcher to it, through a Unix socket whose address it prints: a few small messages,
50 a second at most. The batches themselves do not pass here. From the answers it removes the tasks of data workers that
have left, and reports these tasks to the dispatcher as complete, so that the dispatcher does not wait for them either.

Each line of its standard input is the address of a data worker that leaves. Tasks that the chief knows already stay: it
has to read what they still have. The program answers with an empty line. It exits with its standard input.

It is a process of its own because TensorFlow calls the dispatcher while it holds Python's lock.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from concurrent import futures

import grpc

from tfdist_cli.train.tf_compat.data_service.dispatcher import (
    HEARTBEAT,
    UPDATE,
    WORKERS,
    address_in,
    completed,
    without_tasks,
    worker_addresses,
)

_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
]


class Filter(grpc.GenericRpcHandler):
    """Passes calls to a dispatcher.

    Args:
        dispatcher: the dispatcher's address.
    """

    def __init__(self, dispatcher: str) -> None:
        self._channel = grpc.insecure_channel(dispatcher, options=_OPTIONS)
        self._left: set[str] = set()
        self._shown: set[int] = set()
        """The tasks that the chief knows."""
        self._completed: set[int] = set()
        self._lock = threading.Lock()

    def remove(self, address: str) -> None:
        """Leaves out the data worker at this address, except for the tasks that the chief knows."""
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
            answer = without_tasks(response, self._left, self._shown)
            self._shown |= answer.kept
            for worker, tasks in answer.removed.items():
                new = tasks - self._completed
                if new:
                    self._call(UPDATE, completed(worker, new))
                    self._completed |= new
        return answer.response


def main(dispatcher: str) -> None:
    """Serves until the standard input ends."""
    handler = Filter(dispatcher)
    server = grpc.server(futures.ThreadPoolExecutor(4), handlers=(handler,), options=_OPTIONS)
    with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
        address = f"unix:{folder}/dispatcher"
        server.add_insecure_port(address)
        server.start()
        _write(address)
        for line in sys.stdin:
            handler.remove(line.strip())
            _write("")
        server.stop(None).wait()


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
