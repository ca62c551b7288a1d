"""`tfdist doctor` on this machine."""

import json
import socket

import pytest

pytestmark = pytest.mark.tensorflow


@pytest.fixture
def here(cluster_file, monkeypatch):
    """A cluster of this machine without a recipe of its own."""
    monkeypatch.setenv("COLUMNS", "250")
    return cluster_file


def test_this_machine(tfdist, here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = tfdist("doctor", "--quick")
    assert result.code == 0, result.out
    [line] = [line for line in result.out.splitlines() if line.startswith("this machine")]
    assert len(line) <= 80
    assert "0 errors" in result.out or "no problems found" in result.out


def test_a_cluster_with_a_busy_port(tfdist, here):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        result = tfdist("doctor", here, "--quick", "-s", f"roles.ps.hosts=['127.0.0.1:{port}']")
    assert result.code == 1
    assert f"error [busy-port] this machine: ps:0 cannot listen on port {port}" in result.out
    assert "\n  fix: " in result.out
    assert result.out.splitlines()[-1].startswith("1 error, ")


def test_json(tfdist, here):
    result = tfdist("doctor", here, "--quick", "--json", "-s", "roles.worker.memory=1TiB")
    told = json.loads(result.out)
    assert result.code == 0
    assert told["ok"]
    assert "too-much-memory" in {finding["code"] for finding in told["findings"]}
    [host] = told["hosts"]
    assert set(host["ports"]) == {"chief:0", "worker:0", "worker:1", "ps:0"}
    assert len(host["connections"]) == 4
    assert all(one["right"] and not one["error"] for one in host["connections"])


def test_a_folder_that_cannot_be_written_to(tfdist, here):
    result = tfdist("doctor", here, "--quick", "-s", f"run_dir={here}/runs")
    assert result.code == 1
    assert "error [no-write-access] this machine: " in result.out


def test_a_proxy(tfdist, here, monkeypatch):
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:3128")
    result = tfdist("doctor", here, "--quick")
    assert result.code == 0
    assert "warning [proxy] this machine: http_proxy is http://proxy.invalid:3128" in result.out
    assert "fix: export no_grpc_proxy=127.0.0.1\n" in result.out
