"""Sends back what a connection brings, a number of bytes at a time: `python -m benchmarks.programs.echo PORT BYTES`."""

import socket
import sys


def receive(connection: socket.socket, content: memoryview) -> bool:
    """Fills some memory; returns whether the connection has brought as much."""
    while content:
        received = connection.recv_into(content)
        if not received:
            return False
        content = content[received:]
    return True


if __name__ == "__main__":
    port, count = map(int, sys.argv[1:])
    memory = memoryview(bytearray(count))
    with socket.create_connection(("127.0.0.1", port)) as caller:
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while receive(caller, memory):
            caller.sendall(memory)
