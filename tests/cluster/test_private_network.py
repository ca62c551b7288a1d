"""A recipe's servers, seen from outside and from inside."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.chaos import SERVERS, Training
from tfdist_cli.launch.process import network_namespace

CONNECT = "import socket, sys; socket.create_connection(('localhost', int(sys.argv[1])), timeout=5); print('reached')"


@pytest.mark.cluster
def test_a_ps_is_reached_from_the_runs_own_network_alone(tmp_path):
    training = Training(tmp_path, SERVERS)
    try:
        training.until(lambda: training.trained)
        (event,) = training.events("network")
        if not event["private"]:
            pytest.skip(event["text"])
        pid = training.events("started", "ps:0")[0]["pid"]
        tasks = json.loads((training.run / "plan.json").read_text())["tasks"]
        (port,) = (one["address"].rpartition(":")[2] for one in tasks if one["task"] == "ps:0")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("localhost", int(port)), timeout=5)
        with Path(f"/proc/{pid}/ns/net").open() as net:
            enter = [sys.executable, network_namespace.__file__, "enter", "-1", str(net.fileno())]
            inside = subprocess.run(
                [*enter, sys.executable, "-c", CONNECT, port],
                pass_fds=[net.fileno()],
                capture_output=True,
                text=True,
                check=False,
            )
        assert inside.stdout == "reached\n", inside.stderr
    finally:
        training.process.send_signal(signal.SIGTERM)
        done = training.finish()
    assert done.code == 143
    assert done.processes_left == []
