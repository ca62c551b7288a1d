"""`python -m benchmarks.transfer`: the processor time that a tensor takes from a ps to a worker and back.

TensorFlow moves it between two servers of this machine, in a function of many steps, as parameters and gradients cross:
in requests, or in memory that the servers share. The same function with all operations on the ps computes as much and
moves nothing: the difference is the way. Beside it the same bytes pass between two processes through a TCP connection,
from memory to memory and with nothing around them: no transport through the kernel's connections takes less.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import tensorflow as tf

from benchmarks.cluster import CLUSTER_THREADS, ROOT, base_environment, free_ports
from benchmarks.command import end_on_sigterm, interleaved, publish
from benchmarks.programs.echo import receive
from tfdist_cli.bench.figures import Spread
from tfdist_cli.plan.task_environment import MALLOC
from tfdist_cli.train.cluster.shared_memory import tensors

BYTES = (4, 1_320_000, 2_640_000, 7_500_000)
"""A request alone, half of the MLP 784-500-500-10, all of it, and the MLP 784-1024-1024-10."""
STEPS, CALLS = 20, 20
"""Steps in a function, and its calls."""
_WARM_UP = 3
_START = 30.0
"""Seconds that a program may take to connect."""


@dataclass(frozen=True)
class Cost:
    """Milliseconds of processor time of both processes, for the way there and back.

    Args:
        tensorflow: between TensorFlow's servers.
        shared: between them in shared memory.
        connection: through a bare connection.
    """

    tensorflow: float
    shared: float
    connection: float


def between_servers(
    count: int, addresses: dict[str, list[str]], processes: Sequence[psutil.Process], *, shared: bool
) -> float:
    """Returns the milliseconds of a way between servers.

    Args:
        count: bytes.
        addresses: the cluster.
        processes: the servers.
        shared: whether it is in shared memory.
    """
    ps, worker = (f"/job:{job}/task:0/device:CPU:0" for job in addresses)
    with tf.device(ps):
        value = tf.Variable(tf.zeros([max(1, count // 4)]))

    def moved(tensor: tf.Tensor, start: str, end: str) -> tf.Tensor:
        if not shared or start == end:
            return tensor
        with tf.device(start):
            message = tensors.send(tensor)
        with tf.device(end):
            return tensors.receive(tf.identity(message), tensor.dtype, tensor.shape)

    def steps_at(place: str) -> Callable[[], None]:
        def steps() -> tf.Tensor:
            for _ in range(STEPS):
                with tf.device(ps):
                    read = moved(value + 1.0, ps, place)
                with tf.device(place):
                    computed = tf.tanh(read)
                back = moved(computed, place, ps)
                with tf.device(ps):
                    value.assign(back)
            return back[:1]

        function = tf.function(steps, autograph=False)

        def call() -> None:
            with tf.device(place):
                function().numpy()

        return call

    with tf.device(worker):
        assert tensors.meeting(0, [ps])()
    far, near = (milliseconds(steps_at(place), processes) / STEPS for place in (worker, ps))
    return far - near


def through_a_connection(count: int) -> float:
    """Returns the milliseconds of a way through a bare connection to a process that sends everything back."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-m", "benchmarks.programs.echo", str(listener.getsockname()[1]), str(count)]
        echo = subprocess.Popen(command, cwd=ROOT, env=base_environment())
        listener.settimeout(_START)
        connection, _ = listener.accept()
    with connection:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        content = memoryview(bytearray(count))

        def call() -> None:
            for _ in range(STEPS):
                connection.sendall(content)
                receive(connection, content)

        found = milliseconds(call, [psutil.Process(), psutil.Process(echo.pid)]) / STEPS
    echo.wait()
    return found


def milliseconds(call: Callable[[], None], processes: Sequence[psutil.Process]) -> float:
    """Returns the milliseconds of processor time of some processes that a call takes."""

    def used() -> float:
        times = [process.cpu_times() for process in processes]
        return sum(each.user + each.system for each in times)

    for _ in range(_WARM_UP):
        call()
    before = used()
    for _ in range(CALLS):
        call()
    return 1000 * (used() - before) / CALLS


@contextmanager
def servers() -> Iterator[tuple[dict[str, list[str]], list[psutil.Process]]]:
    """Starts a server of a ps and one of a worker, and connects this process to them."""
    addresses = {job: [f"127.0.0.1:{port}"] for job, port in zip(("ps", "worker"), free_ports(2), strict=True)}
    command = [sys.executable, "-m", "benchmarks.programs.server", json.dumps(addresses)]
    environment = base_environment() | CLUSTER_THREADS | {"GLIBC_TUNABLES": MALLOC}
    started = [
        subprocess.Popen([*command, job], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) for job in addresses
    ]
    try:
        tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec(addresses), protocol="grpc")
        yield addresses, [psutil.Process(each.pid) for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()


def main(argv: Sequence[str] | None = None) -> None:
    """Measures each size in each round, and prints a table."""
    arguments = _parser().parse_args(argv)
    end_on_sigterm()
    with servers() as (addresses, processes):
        results = interleaved(
            arguments.bytes or BYTES,
            arguments.rounds,
            lambda count: Cost(
                between_servers(count, addresses, processes, shared=False),
                between_servers(count, addresses, processes, shared=True),
                through_a_connection(count),
            ),
            lambda count, cost: f"{count} bytes: {cost}",
        )
    publish("benchmarks.transfer", argv, table(results))


def table(results: dict[int, list[Cost]]) -> str:
    """Returns the results as a Markdown table."""
    rows = [
        "| bytes each way | between TensorFlow's servers, ms | in shared memory, ms | through a bare connection, ms |",
        "|---|---|---|---|",
    ]
    for count, costs in results.items():
        ways = zip(*((cost.tensorflow, cost.shared, cost.connection) for cost in costs), strict=True)
        rows.append(f"| {count:,} | {' | '.join(Spread.of(list(each)).shown(2) for each in ways)} |")
    return "\n".join(rows)


def _parser() -> Any:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer", description=__doc__)
    parser.add_argument("bytes", nargs="*", type=int, help="default: those of the benchmarks' models")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default: %(default)s)")
    return parser


if __name__ == "__main__":
    main()
