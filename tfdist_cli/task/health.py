"""`python -m tfdist_cli.task.health`: the health check of a container's task.

A ps, a worker and the tasks of the tf.data service are healthy if their server responds. Any other task is healthy
while its process runs, and a container exits with its process.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import PurePath

import psutil

from tfdist_cli.protocol.run_files import parse_object
from tfdist_cli.spec.roles import ROLES

_LISTENING = [role for role, traits in ROLES.items() if traits.listens and not traits.drives]
_TIMEOUT = 5.0
_CLIENT_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The first bytes of a gRPC client: the HTTP/2 preface and an empty SETTINGS frame (RFC 9113, section 3.4)."""
_SETTINGS_FRAME = 4


def main() -> int:
    """Prints which server does not respond, and returns 1; or returns 0."""
    for process in psutil.process_iter():
        try:
            argv = process.cmdline()
            if not is_server(argv, os.environ):
                continue
            ports = {one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if not any(responds(port) for port in ports):
            print(f"process {process.pid} does not respond on {sorted(ports) or 'any port'}")  # noqa: T201 - the result
            return 1
    return 0


def is_server(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Returns whether a command is `tfdist role` for a task that runs a server."""
    words = [PurePath(word).name for word in argv[:4]]
    program = next((number for number, word in enumerate(words) if word in ("tfdist", "tfdist_cli")), None)
    if program is None or words[program + 1 : program + 2] != ["role"]:
        return False
    named = [after for word, after in pairwise(argv) if word == "--task"]
    named += [word.removeprefix("--task=") for word in argv if word.startswith("--task=")]
    return (named[-1] if named else _task_of(environ)).partition(":")[0] in _LISTENING


def _task_of(environ: Mapping[str, str]) -> str:
    try:
        return str(parse_object(environ.get("TF_CONFIG", ""))["task"]["type"])
    except (ValueError, KeyError, TypeError):
        return ""


def responds(port: int) -> bool:
    """Returns whether a gRPC server responds on this port. A connection is not enough: a stopped process accepts it."""
    try:
        with socket.create_connection(("localhost", port), _TIMEOUT) as connection:
            connection.sendall(_CLIENT_PREFACE)
            header = connection.recv(9, socket.MSG_WAITALL)
    except OSError:
        return False
    return len(header) == 9 and header[3] == _SETTINGS_FRAME


if __name__ == "__main__":
    sys.exit(main())
