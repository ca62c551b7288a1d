"""What the probe sees of a real machine."""

import ast
import json
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tfdist_cli.doctor import probe

LOOK = {"do": "look", "imports": False, "names": [], "folders": []}
as_root = pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounts a file system, as root")


def asked(*questions, python=sys.executable, **env):
    """What a probe, run as a host runs it, answers."""
    run = subprocess.run(
        [python, "-c", Path(probe.__file__).read_text()],
        input="".join(json.dumps(question) + "\n" for question in questions),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **env},
    )
    return [json.loads(line) for line in run.stdout.splitlines()]


@contextmanager
def mounted(path, options):
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_it_looks():
    [told] = asked(LOOK | {"names": ["localhost", "nobody.invalid"]})
    assert told["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert told["executable"] == sys.executable
    assert told["versions"]["tensorflow"]
    assert told["versions"]["keras"]
    assert told["memory"]["total"] > told["memory"]["available"] > 2**20
    assert "127.0.0.1" in told["addresses"]
    assert told["names"]["localhost"]
    assert told["names"]["nobody.invalid"] == []


def test_an_interpreter_without_tensorflow(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    [told] = asked(LOOK | {"imports": True}, python=str(tmp_path / "venv" / "bin" / "python"), PYTHONPATH="")
    assert told["versions"] == {"tensorflow": "", "keras": "", "tfdist": ""}
    assert told["imported"]["error"].startswith("ModuleNotFoundError: No module named 'keras'")


@pytest.mark.slow
def test_tensorflow_says_what_it_sees():
    [told] = asked(LOOK | {"imports": True})
    assert told["imported"]["tensorflow"] == told["versions"]["tensorflow"]
    assert told["imported"]["keras"] == told["versions"]["keras"]
    assert told["imported"]["gpus"] == len(told["gpus"]) or not told["imported"]["cuda"]


def test_a_folder_that_can_be_written_to_stays_as_it_was(tmp_path):
    told = probe.written(str(tmp_path / "not" / "there"))
    assert told["at"] == str(tmp_path)
    assert told["free"] > 0
    assert "error" not in told
    assert not list(tmp_path.iterdir())


@as_root
def test_a_full_disk_and_one_that_may_not_be_written_to(tmp_path):
    with mounted(tmp_path / "tiny", "size=64k") as tiny:
        assert probe.written(str(tiny)) == {
            "at": str(tiny),
            "free": 2**16,
            "error": "No space left on device",
            "full": True,
        }
    with mounted(tmp_path / "fixed", "size=64k,ro") as fixed:
        told = probe.written(str(fixed / "runs"))
        assert (told["at"], told["error"], told["full"]) == (str(fixed), "Read-only file system", False)


def test_a_file_where_a_folder_should_be(tmp_path):
    (tmp_path / "file").write_text("")
    assert probe.written(str(tmp_path / "file"))["error"] == "Not a directory"


def test_proxies_without_their_passwords():
    [told] = asked(LOOK, http_proxy="http://me:secret@proxy:3128", NO_PROXY="a,b", no_proxy="", no_grpc_proxy="")
    assert told["proxies"]["http_proxy"] == "proxy:3128"
    assert told["no_proxy"] == "a,b"
    assert "secret" not in json.dumps(told)


def test_it_listens_as_a_server_does_and_names_who_does_so_already():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        listening, reached = asked(
            {"do": "listen", "ports": {"ps:0": 0, "ps:1": port}, "token": "hello"}, {"do": "connect", "to": []}
        )
    assert reached == []
    assert listening["ps:1"]["error"] == "EADDRINUSE"
    assert listening["ps:1"]["by"].endswith(f"(pid {os.getpid()})")
    assert listening["ps:0"]["port"] > 1023


def test_who_listens_is_named_although_descriptors_close_meanwhile(monkeypatch):
    readlink, closed = os.readlink, []

    def closing(path):
        if not closed:
            closed.append(path)
            raise FileNotFoundError(path)
        return readlink(path)

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(os, "readlink", closing)
        monkeypatch.setattr(Path, "glob", lambda *_: [Path(f"/proc/{os.getpid()}")])
        assert probe.user_of(server.getsockname()[1]).endswith(f"(pid {os.getpid()})")
    assert closed


def test_who_connects_hears_the_token():
    told = probe.listen({"ps:0": 0}, "hello")["ps:0"]
    with socket.create_server(("127.0.0.1", 0)) as closed:
        free = closed.getsockname()[1]
    answers = probe.connect([("127.0.0.1", told["port"]), ("127.0.0.1", free), ("nobody.invalid", 1)])
    assert answers[0]["heard"] == "hello"
    assert answers[1]["error"] == "ECONNREFUSED"
    assert answers[2]["error"] == "unknown"


def test_a_host_that_drops_packets_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(probe, "CONNECT_TIMEOUT", 0.05)
    with socket.socket() as full:  # its queue takes one connection, and the kernel drops the others
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        with socket.create_connection(address), socket.socket() as second:
            second.setblocking(False)
            second.connect_ex(address)
            assert probe.connect([address]) == [{"error": "timeout"}]


def test_it_is_written_for_python_3_7():
    ast.parse(Path(probe.__file__).read_text(), feature_version=(3, 7))
