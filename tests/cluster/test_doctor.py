"""`tfdist doctor` on hosts with ssh, with one fault at a time."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from tests.support.lab.hosts import ROOT, missing

WITHOUT = missing() or ("" if shutil.which("iptables") else "firewalls need iptables: apt-get install iptables")
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT)]


@pytest.fixture
def doctor(lab, tmp_path):
    """Runs `tfdist doctor` on a cluster of the three hosts, with the test's settings of `ssh`."""
    folder = lab.config.parent
    common = "Host *\n  User root\n  IdentitiesOnly yes\n  LogLevel ERROR\n  ConnectTimeout 5\n"
    common += f"  UserKnownHostsFile {folder}/known_hosts\n  StrictHostKeyChecking no\n"

    def run(addresses=None, keys=None, ports=None, **changes):
        of_hosts = ""
        for host in lab.hosts:
            key, port = (keys or {}).get(host.address, folder / "id"), (ports or {}).get(host.address, 22)
            of_hosts += f"Host {host.address}\n  IdentityFile {key}\n  Port {port}\n"
        (tmp_path / "config").write_text(of_hosts + common)
        chief, ps, worker = addresses or [host.address for host in lab.hosts]
        given = {"chief": f"{chief}:2222", "ps": f"{ps}:2223", "worker": f"{worker}:2224"}
        cluster = {
            "strategy": "parameter_server",
            "launcher": "ssh",
            "ssh": {"config": "config", "run_dir": str(tmp_path / "runs")},
            "roles": {role: {"hosts": [address]} for role, address in given.items()},
        }
        (tmp_path / "cluster.yaml").write_text(json.dumps(cluster | changes))
        done = subprocess.run(
            [sys.executable, "-m", "tfdist_cli", "doctor", "cluster.yaml", "--quick", "--json"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.startswith("{"), done.stderr
        report = json.loads(done.stdout)
        assert done.returncode == (0 if report["ok"] else 1)
        return report

    return run


def errors(report):
    return [(finding["code"], finding["place"]) for finding in report["findings"] if finding["level"] == "error"]


def finding_of(report, code):
    return next(finding for finding in report["findings"] if finding["code"] == code)


def test_hosts_without_faults_have_only_exposed_ports(doctor, lab):
    """This machine runs no task, and can connect to the tasks' ports."""
    report = doctor()
    assert report["ok"], report["findings"]
    assert {(finding["code"], finding["place"]) for finding in report["findings"]} == {
        ("exposed-port", host.address) for host in lab.hosts
    }
    assert "chief:0 at" in report["findings"][0]["message"]
    here, *hosts = report["hosts"]
    assert not here["tasks"]
    assert {host["name"]: host["facts"]["hostname"] for host in hosts} == {h.address: h.name for h in lab.hosts}
    for host in hosts:
        assert [(one["error"], one["right"]) for one in host["connections"]] == [("", True)] * 3
        assert host["facts"]["versions"]["tensorflow"]


def test_hosts_on_which_tasks_are_placed(doctor, lab):
    roles = {"chief": {}, "ps": {}, "worker": {"replicas": 2}}
    report = doctor(roles=roles, hosts=[host.address for host in lab.hosts])
    assert report["ok"], report["findings"]
    assert [one["name"] for one in report["hosts"][1:]] == [host.address for host in lab.hosts]
    tried = [one["address"].rpartition(":")[0] for one in report["hosts"][1]["connections"]]
    assert set(tried) == {host.address for host in lab.hosts}


def test_a_busy_port_and_a_blocked_one(doctor, lab):
    chief, ps, worker = lab.hosts
    listener = "import socket; s = socket.create_server(('', 2222)); print('up', flush=True); s.accept()"
    rule = ["INPUT", "-p", "tcp", "--dport", "2223", "-j", "DROP"]
    with chief.running(sys.executable, "-c", listener, ready="up"):
        subprocess.run(["ip", "netns", "exec", ps.name, "iptables", "-A", *rule], check=True)
        try:
            report = doctor()
        finally:
            subprocess.run(["ip", "netns", "exec", ps.name, "iptables", "-D", *rule], check=True)
    assert set(errors(report)) == {("blocked-port", ps.address), ("busy-port", chief.address)}
    busy = finding_of(report, "busy-port")["message"]
    assert re.search(r"chief:0\b.*\b2222\b.*\bpython", busy)
    blocked = finding_of(report, "blocked-port")
    assert f"ps:0 at {ps.address}:2223" in blocked["message"]
    assert chief.address in blocked["fix"] or worker.address in blocked["fix"]
    assert "2223" in blocked["fix"]


def test_the_firewall_that_the_documentation_recommends(doctor, lab):
    """Only the cluster's tasks can connect."""
    page = (ROOT / "docs" / "how-to" / "secure-ports.md").read_text(encoding="utf-8")
    rules = next(block for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if block.startswith("iptables"))
    for index, host in enumerate(lab.hosts, 1):
        rules = rules.replace(f"10.0.0.{index}", host.address)
    for host in lab.hosts:
        subprocess.run(["ip", "netns", "exec", host.name, "sh", "-ec", rules], check=True)
    try:
        report = doctor()
    finally:
        for host in lab.hosts:
            for program in ("iptables", "ip6tables"):
                subprocess.run(["ip", "netns", "exec", host.name, program, "-F", "INPUT"], check=True)
    assert not report["findings"]
    assert [one["error"] for one in report["hosts"][0]["connections"]] == ["timeout"] * 3


def test_an_unreachable_host(doctor, lab):
    chief, ps, worker = lab.hosts
    gone = ps.address.rpartition(".")[0] + ".77"
    report = doctor(addresses=[chief.address, gone, worker.address])
    assert errors(report) == [("unreachable", gone)]


def test_a_refused_key_a_wrong_ssh_port_and_an_unknown_host(doctor, lab, tmp_path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    chief, ps, _ = lab.hosts
    report = doctor(
        addresses=[chief.address, ps.address, "nowhere.invalid"],
        keys={chief.address: tmp_path / "other"},
        ports={ps.address: 2299},
    )
    assert set(errors(report)) == {
        ("refused-key", chief.address),
        ("no-ssh-server", ps.address),
        ("unknown-host", "nowhere.invalid"),
    }
    assert finding_of(report, "refused-key")["fix"].endswith(f"ssh-copy-id {chief.address}")
    assert "port 2299: Connection refused" in finding_of(report, "no-ssh-server")["message"]


def test_a_full_disk_and_a_read_only_disk(doctor, lab, tmp_path):
    chief, _, _ = lab.hosts
    (tmp_path / "runs").mkdir()
    there = ["nsenter", "--mount", "--target", str(chief.sshd.pid)]
    for options, code in (("size=64k", "no-disk"), ("ro", "no-write-access")):
        subprocess.run([*there, "mount", "-t", "tmpfs", "-o", options, "tmpfs", str(tmp_path / "runs")], check=True)
        try:
            report = doctor()
        finally:
            subprocess.run([*there, "umount", str(tmp_path / "runs")], check=True)
        assert errors(report) == [(code, chief.address)]
        assert f"{tmp_path}/runs" in finding_of(report, code)["message"]
