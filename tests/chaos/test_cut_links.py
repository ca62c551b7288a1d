"""A link that is cut without a word, between two hosts that are network namespaces of this one."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(60)]
ROOT = Path(__file__).parents[2]
NEAR, FAR = f"tfdist-near-{os.getpid()}", f"tfdist-far-{os.getpid()}"
LISTENS = """
import socket, sys
with socket.create_server(("10.79.0.2", 2222)) as listener:
    print("listening", flush=True)
    connection, _ = listener.accept()
    connection.sendall(b"hello")
    connection.recv(1)
"""
CONNECTS = """
import socket, sys
from tfdist_cli.train.cluster import keep_alive as links
links._OPTIONS = tuple((level, name, {"TCP_USER_TIMEOUT": 3000, "TCP_KEEPCNT": 2}.get(name, 1))
                       for level, name, _ in links._OPTIONS)
with socket.create_connection(("10.79.0.2", 2222)) as connection:
    connection.recv(5)
    if "bounded" in sys.argv:
        links.set_timeouts({2222}, set())
    print("connected", flush=True)
    sys.stdin.readline()
    if "sends" in sys.argv:
        connection.sendall(b"what is lost")
    connection.settimeout(8)
    try:
        connection.recv(1)
    except OSError as error:
        print(error, flush=True)
"""


def ip(*arguments):
    return subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)


@pytest.fixture
def hosts():
    """Runs Python on a host: `hosts(NEAR, code)`; `NEAR` and `FAR` are connected."""
    try:
        made = [ip("netns", "add", host) for host in (NEAR, FAR)]
    except FileNotFoundError:
        pytest.skip("there is no `ip` command here")
    processes = []

    def run(host, code, *arguments):
        processes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", host, sys.executable, "-c", code, *arguments],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return processes[-1]

    try:
        made.append(ip("link", "add", "near", "netns", NEAR, "type", "veth", "peer", "name", "far", "netns", FAR))
        for host, name, address in ((NEAR, "near", "10.79.0.1/24"), (FAR, "far", "10.79.0.2/24")):
            made += [ip("-n", host, "addr", "add", address, "dev", name), ip("-n", host, "link", "set", name, "up")]
        wrong = [each.stderr.strip() for each in made if each.returncode]
        if wrong:
            pytest.skip(f"no hosts can be made here: {wrong[0]}")
        yield run
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        for host in (NEAR, FAR):
            ip("netns", "del", host)


@pytest.mark.parametrize("sends", ["sends", "waits"])
def test_a_connection_that_is_bounded_ends_in_time(hosts, sends):
    far = hosts(FAR, LISTENS)
    assert far.stdout.readline() == "listening\n"
    near = hosts(NEAR, CONNECTS, "bounded", sends)
    assert near.stdout.readline() == "connected\n"
    assert ip("-n", FAR, "link", "set", "far", "down").returncode == 0
    began = time.monotonic()
    near.stdin.write("go on\n")
    near.stdin.flush()
    assert near.stdout.readline().split("]")[0] in ("[Errno 110", "[Errno 113")
    assert time.monotonic() - began < 10


def test_one_that_is_not_would_wait_for_ever(hosts):
    """Else the test above would show nothing."""
    far = hosts(FAR, LISTENS)
    assert far.stdout.readline() == "listening\n"
    near = hosts(NEAR, CONNECTS, "sends")
    assert near.stdout.readline() == "connected\n"
    assert ip("-n", FAR, "link", "set", "far", "down").returncode == 0
    near.stdin.write("go on\n")
    near.stdin.flush()
    assert near.stdout.readline() == "timed out\n"  # the program's own patience
