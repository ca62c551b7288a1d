"""The application of a launch in a SparkSession that runs already: barrier stages of the program that owns it.

The program has a `SessionServer`, a Unix socket in a private folder. In place of `spark-submit`, the launcher starts
this module as its driver. It passes the address for the agents on to the program, which runs the stage. If either of
the two ends, the connection ends, and the stage is cancelled.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tfdist_cli.launch.slots.driver_errors import DriverError, error_line
from tfdist_cli.launch.slots.handshake import DRIVER, SECRET, Caller, connect, exit_with
from tfdist_cli.launch.spark.barrier import run_slot
from tfdist_cli.launch.spark.driver import driver_error, too_few_slots

_POLL_SECONDS = 0.5
_DYNAMIC = "spark.dynamicAllocation.enabled"


class SessionServer:
    """Runs barrier stages in a SparkContext, as long as the `with` block lasts.

    Args:
        context: the SparkContext.
        count_slots: returns the number of slots of its executors, free or not.
    """

    def __init__(self, context: Any, count_slots: Callable[[], int]) -> None:
        self._context = context
        self._count_slots = count_slots
        self._folder = tempfile.TemporaryDirectory(prefix="tfdist-spark-")  # nobody else may enter it
        self.path = Path(self._folder.name, "session")
        """The Unix socket, which the cluster file names as `spark.session`."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> SessionServer:  # noqa: PYI034 typing has Self since Python 3.11
        self._listener.bind(str(self.path))
        self._listener.listen()
        threading.Thread(target=self._serve, name="tfdist-spark-session", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            for connection in self._connections:
                connection.shutdown(socket.SHUT_RDWR)
        self._folder.cleanup()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with self._lock:
                self._connections.add(connection)
            threading.Thread(target=self._run, args=(connection,), daemon=True).start()

    def _run(self, connection: socket.socket) -> None:
        """Runs one stage, and sends the error with which it ends."""
        with connection, connection.makefile("r") as orders:
            order = json.loads(orders.readline() or "null")
            if order:
                error = self._run_stage(order, orders)
                _end(connection, error)
            with self._lock:
                self._connections.discard(connection)

    def _run_stage(self, order: dict[str, Any], orders: IO[str]) -> DriverError | None:
        group, ended = f"tfdist-{uuid.uuid4().hex}", threading.Event()

        def cancel_at_end() -> None:
            orders.read()
            ended.set()
            self._context.cancelJobGroup(group)

        slots = order["slots"]
        self._context.setJobGroup(group, f"tfdist: {slots} tasks", interruptOnCancel=True)
        threading.Thread(target=cancel_at_end, daemon=True).start()
        try:
            if missing := self._await_slots(slots, order["slots_seconds"], ended):
                return missing
            if ended.is_set():
                return None
            stage = self._context.parallelize(range(slots), slots).barrier()
            stage.mapPartitions(partial(run_slot, tuple(order["launcher"]), order["secret"])).collect()
        except Exception as error:  # noqa: BLE001 all are for the launcher
            return driver_error(error, slots)
        return None

    def _await_slots(self, slots: int, seconds: float, ended: threading.Event) -> DriverError | None:
        """Waits until the session's executors have enough slots; returns the error if they do not in time.

        Spark itself tries a stage that needs more slots again for ten minutes, also when its job is cancelled, and runs
        it when there are enough. Of a session with dynamic allocation Spark refuses the stage.
        """
        if self._context.getConf().get(_DYNAMIC, "false") == "true":
            return None
        deadline = time.monotonic() + seconds
        while (found := self._count_slots()) < slots:
            if time.monotonic() > deadline:
                return too_few_slots(slots, found)
            if ended.wait(_POLL_SECONDS):
                return None
        return None


def _end(connection: socket.socket, error: DriverError | None) -> None:
    """Sends an error, and ends the connection for the thread that reads it, too."""
    with suppress(OSError):  # the launcher has ended
        if error:
            connection.sendall(error_line(error).encode())
        connection.shutdown(socket.SHUT_RDWR)


def main() -> int:
    """Has the session run the stage until its agents have exited; returns the exit code."""
    path, address, slots, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    host, _, port = address.rpartition(":")
    launcher, secret = (host, int(port)), os.environ.pop(SECRET)
    control = connect(launcher, secret, Caller(DRIVER, socket.gethostname()))
    threading.Thread(target=exit_with, args=(control,), daemon=True).start()
    with socket.socket(socket.AF_UNIX) as session:
        try:
            session.connect(path)
        except OSError as error:
            sys.stdout.write(error_line(_no_session(path, error)))
            return 1
        order = {"launcher": launcher, "secret": secret, "slots": slots, "slots_seconds": seconds}
        session.sendall(json.dumps(order).encode() + b"\n")
        with session.makefile("r") as answers:
            answer = answers.read()
    sys.stdout.write(answer)
    return 1 if answer else 0


def _no_session(path: str, error: OSError) -> DriverError:
    return DriverError(
        f"no program with a SparkSession answers at {path}: {error.strerror}",
        "spark-unreachable",
        "remove spark.session from the cluster file: tfdist.spark.fit sets it",
        usage=True,
    )


if __name__ == "__main__":
    sys.exit(main())
