"""Faults that are planted among the facts are named, each with its fix."""

import json
from pathlib import Path

import pytest

from tfdist_cli.doctor.examine import Connection, HostResult, NoAnswer
from tfdist_cli.doctor.findings import as_json, findings_of
from tfdist_cli.doctor.host import OLDEST
from tfdist_cli.doctor.sites import HERE, Site
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.ssh import HostSpec
from tfdist_cli.spec.task_id import TaskId

CHIEF, WORKER, PS = TaskId("chief"), TaskId("worker"), TaskId("ps")
ADDRESSES = {CHIEF: Address("h1", 2222), WORKER: Address("h2", 2222), PS: Address("h2", 2223)}
CLUSTER = Cluster.model_validate(
    {
        "strategy": "parameter_server",
        "roles": {"chief": {"hosts": ["h1"]}, "worker": {"hosts": ["h2"]}, "ps": {"hosts": ["h2:2223"]}},
    }
)
GIB = 2**30
ROOT = Path(__file__).parents[2]


def facts(**changes):
    return {
        "hostname": "h",
        "python": "3.11.2",
        "executable": "/opt/venv/bin/python",
        "versions": {"tensorflow": "2.21.0", "keras": "3.12.0", "tfdist": "0.1.0"},
        "imported": {"tensorflow": "2.21.0", "keras": "3.12.0", "gpus": 0, "cuda": False},
        "keras_backend": ["tensorflow", "KERAS_BACKEND"],
        "cores": 8,
        "memory": {"total": 32 * GIB, "available": 30 * GIB},
        "gpus": [],
        "addresses": ["10.77.0.9", "127.0.0.1", "::1", "fe80::1"],
        "names": {"h1": ["10.77.0.1"], "h2": ["10.77.0.2"]},
        "folders": {"/runs": {"at": "/", "free": 100 * GIB}},
        "proxies": {},
        "no_proxy": "",
        "firewall": "nft",
    } | changes


def hosts(h1=None, h2=None, here=None, *, connections=(), ports=None, clock=0.0):
    """This machine, which runs nothing, and two hosts; `h1` and the others are changes of their facts."""
    told = ports or {}
    seen = [HostResult(Site(HERE, folders={"run directories": "/runs"}), facts(**(here or {})))]
    for name, tasks, changes in (("h1", (CHIEF,), h1), ("h2", (WORKER, PS), h2)):
        given = {task: ADDRESSES[task] for task in tasks}
        there = CLUSTER, HostSpec(address=name)
        site = Site(name, ports=given, folders={"run directories": "/runs"}, tasks=tasks, ssh=there)
        listened = {task: told.get(task, {"port": ADDRESSES[task].port}) for task in tasks}
        reached = tuple(Connection(task, ADDRESSES[task], *told) for who, task, *told in connections if who == name)
        seen.append(
            HostResult(site, facts(**(changes or {})), None, (clock if name == "h2" else 0.0, 0.01), listened, reached)
        )
    return seen


def only(seen, cluster=CLUSTER, **options):
    [finding] = findings_of(seen, cluster, **options)
    return finding


def told(finding):
    return finding.code, finding.level, finding.place


def test_nothing_is_found_where_nothing_is_wrong():
    reached = [(who, task) for who in ("h1", "h2") for task in ADDRESSES]
    assert not findings_of(hosts(connections=reached), CLUSTER)
    assert not findings_of([HostResult(Site(HERE), facts())])


@pytest.mark.parametrize(
    ("code", "said", "fault", "fix"),
    [
        (255, "ssh: Could not resolve hostname h2: Name or service not known", "unknown-host", "correct its name"),
        (255, "root@h2: Permission denied (publickey).", "refused-key", "ssh-copy-id h2"),
        (255, "ssh: connect to host h2 port 2299: Connection refused", "no-ssh-server", "correct the ssh port"),
        (255, "ssh: connect to host h2 port 22: Connection timed out", "unreachable", "check that h2 is up"),
        (
            255,
            "No ED25519 host key is known\nHost key verification failed.",
            "unknown-host-key",
            "verify its key",
        ),
        (255, "Connection closed by 10.77.0.2", "no-answer", "`ssh h2 python3 --version`"),
        (113, "", "no-python", "install Python"),
        (None, "no answer within 30 s", "no-answer", "`ssh h2"),
        (1, "SyntaxError: invalid syntax", "no-answer", "`ssh h2"),
    ],
)
def test_a_host_that_does_not_answer(code, said, fault, fix):
    seen = hosts()
    seen[2] = HostResult(seen[2].site, no_answer=NoAnswer(code, said))
    finding = only(seen)
    assert told(finding) == (fault, "error", "h2")
    assert fix in finding.fix
    assert said.rpartition("\n")[2] in finding.message


def test_no_tensorflow():
    finding = only(hosts(h2={"versions": {"tensorflow": "", "keras": "", "tfdist": "0.1.0"}, "imported": None}))
    assert told(finding) == ("no-tensorflow", "error", "h2")
    assert finding.fix.startswith("/opt/venv/bin/python -m pip install 'tfdist-cli[cpu]'")


def test_a_program_of_the_users_own_may_do_without():
    assert not findings_of(hosts(h2={"versions": {"tensorflow": "", "keras": "", "tfdist": ""}}), CLUSTER, trains=False)


def test_a_tensorflow_that_cannot_be_imported():
    finding = only(hosts(h1={"imported": {"error": "ImportError: libfoo.so.1: cannot open shared object file"}}))
    assert told(finding) == ("broken-tensorflow", "error", "h1")
    assert "libfoo" in finding.message


def test_no_tfdist():
    finding = only(hosts(h1={"versions": {"tensorflow": "2.21.0", "keras": "3.12.0", "tfdist": ""}}))
    assert told(finding) == ("no-tfdist", "error", "h1")
    assert finding.fix == "/opt/venv/bin/python -m pip install tfdist-cli"


@pytest.mark.parametrize(
    ("changes", "level", "message"),
    [
        ({"tensorflow": "2.20.1"}, "error", "TensorFlow is 2.20.1, and 2.21.0 on h1"),
        ({"keras": "3.13.1"}, "warning", "Keras is 3.13.1, and 3.12.0 on h1"),
        ({"tfdist": "0.2.0"}, "error", "tfdist is 0.2.0, and 0.1.0 on h1"),
    ],
)
def test_a_wrong_version(changes, level, message):
    finding = only(hosts(h2={"versions": facts()["versions"] | changes}))
    assert told(finding) == ("wrong-version", level, "h2")
    assert finding.message == message
    assert "give both the same: pip install" in finding.fix


def test_versions_that_differ_where_it_does_not_matter():
    assert not findings_of(hosts(h2={"versions": facts()["versions"] | {"tensorflow": "2.21.1"}}), CLUSTER)
    assert not findings_of(hosts(here={"versions": dict.fromkeys(facts()["versions"], "")}), CLUSTER)
    finding = only(hosts(h2={"python": "3.12.0"}))
    assert told(finding) == ("wrong-version", "warning", "h2")


def test_versions_that_are_too_old():
    found = findings_of(hosts(*[{"versions": facts()["versions"] | {"keras": "3.9.2"}}] * 2), CLUSTER)
    assert [(told(finding), finding.fix.rpartition(" ")[2]) for finding in found] == [
        (("old-version", "error", host), "'keras>=3.12'") for host in ("h1", "h2")
    ]
    assert told(only(hosts(*[{"python": "3.9.18"}] * 2)[:2])) == ("old-python", "error", "h1")


def test_what_is_too_old_is_what_the_package_says():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    numbers = {package: ".".join(map(str, numbers)) for package, numbers in OLDEST.items()}
    assert f'requires-python = ">={numbers["Python"]}"' in project
    assert f'"keras>={numbers["Keras"]}"' in project
    assert f'"tensorflow-cpu>={numbers["TensorFlow"]};' in project


def test_a_clock_that_is_off():
    finding = only(hosts(clock=-7.5))
    assert told(finding) == ("clock-off", "warning", "h2")
    assert "7.5 s behind" in finding.message
    assert "set-ntp" in finding.fix
    assert not findings_of(hosts(clock=1.9), CLUSTER)


def test_no_write_access():
    finding = only(
        hosts(h1={"folders": {"/runs": {"at": "/", "free": GIB, "error": "Permission denied", "full": False}}})
    )
    assert told(finding) == ("no-write-access", "error", "h1")
    assert " to /, " in finding.fix
    assert "run_dir" in finding.fix


def test_a_full_disk_and_one_that_is_nearly_full():
    full = {"/runs": {"at": "/runs", "free": 0, "error": "No space left on device", "full": True}}
    finding = only(hosts(h1={"folders": full}))
    assert told(finding) == ("no-disk", "error", "h1")
    assert " below /runs" in finding.fix
    assert told(only(hosts(h1={"folders": {"/runs": {"at": "/", "free": 5 * 2**20}}}))) == (
        "little-disk",
        "warning",
        "h1",
    )


@pytest.mark.parametrize(
    ("exempt", "warned"), [("", True), ("localhost", True), ("h1, h2", False), ("*", False), ("h1,h2,x", False)]
)
def test_a_proxy(exempt, warned):
    found = findings_of(hosts(h2={"proxies": {"http_proxy": "proxy:3128"}, "no_proxy": exempt}), CLUSTER)
    assert [told(finding) for finding in found] == [("proxy", "warning", "h2")] * warned
    assert [finding.fix for finding in found] == ["export no_grpc_proxy=h1,h2"] * warned


def test_a_name_that_a_host_does_not_know():
    connections = [("h1", WORKER, "unknown"), ("h1", PS, "unknown")]
    finding = only(hosts(h1={"names": {"h1": ["127.0.1.1"], "h2": []}}, connections=connections))
    assert told(finding) == ("unknown-name", "error", "h1")
    assert "IP-ADDRESS h2" in finding.fix


def test_a_busy_port():
    busy = {"port": 2222, "error": "EADDRINUSE", "by": "nginx (pid 7)"}
    finding = only(hosts(ports={WORKER: busy}))
    assert told(finding) == ("busy-port", "error", "h2")
    assert "worker:0 " in finding.message
    assert " 2222: " in finding.message
    assert "nginx (pid 7)" in finding.message
    low = only(hosts(ports={PS: {"port": 80, "error": "EACCES", "by": ""}}))
    assert told(low) == ("forbidden-port", "error", "h2")


@pytest.mark.parametrize(
    ("firewall", "command"),
    [
        ("nft", "nft insert rule inet filter input ip saddr 10.77.0.9 tcp dport 2223 accept"),
        ("iptables", "iptables -I INPUT -p tcp -s 10.77.0.9 --dport 2223 -j ACCEPT"),
        ("ufw", "ufw allow from 10.77.0.9 to any port 2223 proto tcp"),
        ("firewalld", 'source address="10.77.0.9" port port="2223" protocol="tcp" accept'),
        ("", "a rule for TCP from 10.77.0.9 to port 2223"),
    ],
)
def test_a_blocked_port(firewall, command):
    finding = only(hosts(h2={"firewall": firewall}, connections=[("h1", PS, "timeout"), ("h2", PS)]))
    assert told(finding) == ("blocked-port", "error", "h2")
    assert finding.message.startswith("h1 ")
    assert " ps:0 at h2:2223: " in finding.message
    assert command in finding.fix


def test_all_that_a_host_refuses_is_told_once():
    finding = only(hosts(connections=[("h1", WORKER, "ECONNREFUSED"), ("h1", PS, "ECONNREFUSED")]))
    assert " worker:0 at h2:2222 and ps:0 at h2:2223: " in finding.message
    assert finding.fix.endswith("; the same for the other port")


def test_a_firewall_that_stops_even_the_host_itself():
    own = {"addresses": ["10.77.0.2", "127.0.0.1"], "names": {"h2": ["10.77.0.2"]}}
    finding = only(hosts(h2=own, connections=[("h2", PS, "timeout"), ("h1", PS, "timeout")]))
    assert told(finding) == ("blocked-port", "error", "h2")
    assert "saddr 10.77.0.9" in finding.fix


def test_an_address_of_another_machine():
    finding = only(hosts(connections=[("h1", WORKER, "", False)]))
    assert told(finding) == ("wrong-host", "error", "h2")
    assert " worker:0 at h2:2222" in finding.message
    finding = only(hosts(connections=[("h2", WORKER, "timeout")]))
    assert told(finding) == ("wrong-host", "error", "h2")


def test_a_public_address():
    finding = only(hosts(h2={"addresses": ["10.77.0.2", "8.8.8.8"]}))
    assert told(finding) == ("exposed-port", "warning", "h2")
    assert "8.8.8.8" in finding.message
    assert "ports 2222, 2223" in finding.message
    assert "docs/how-to/secure-ports.md" in finding.fix


def test_a_public_address_beside_a_network_of_the_tasks_own():
    local = {"strategy": "parameter_server", "roles": {"chief": {}, "worker": {}, "ps": {}}}
    site = Site(HERE, ports={PS: Address("127.0.0.1", 0)}, tasks=(PS,))
    seen = [HostResult(site, facts(addresses=["8.8.8.8"]), ports={PS: {"port": 40000}})]
    assert not findings_of(seen, Cluster.model_validate(local))
    finding = only(seen, Cluster.model_validate({**local, "network": "host"}))
    assert told(finding) == ("exposed-port", "warning", HERE)
    assert "8.8.8.8" in finding.message


def test_a_port_that_is_reached_from_outside():
    seen = hosts()
    seen[0] = HostResult(
        seen[0].site, seen[0].facts, connections=(Connection(WORKER, ADDRESSES[WORKER]), Connection(PS, ADDRESSES[PS]))
    )
    finding = only(seen)
    assert told(finding) == ("exposed-port", "warning", "h2")
    assert finding.message.startswith(HERE)
    assert " worker:0 at h2:2222: " in finding.message
    seen[0] = HostResult(seen[0].site, seen[0].facts, connections=(Connection(WORKER, ADDRESSES[WORKER], "timeout"),))
    assert not findings_of(seen, CLUSTER)


def test_gpus():
    two = [{"name": "NVIDIA A100"}, {"name": "NVIDIA A100"}]
    finding = only(hosts(h2={"gpus": two}))
    assert told(finding) == ("gpus-unused", "warning", "h2")
    assert "2 GPUs" in finding.message
    roles = CLUSTER.roles.model_copy(update={"worker": CLUSTER.roles.worker.model_copy(update={"gpus": [0, 2]})})
    asking = CLUSTER.model_copy(update={"roles": roles})
    finding = only(hosts(h2={"gpus": two, "imported": None}), asking)
    assert told(finding) == ("too-few-gpus", "error", "h2")
    assert "3 GPUs" in finding.message


def test_memory():
    finding = only(hosts(h2={"memory": {"total": 32 * GIB, "available": GIB // 2}}))
    assert told(finding) == ("little-memory", "warning", "h2")
    assert "1.0 GiB" in finding.message
    assert "0.5 GiB" in finding.message
    assert not findings_of(hosts(h2={"memory": {"total": None, "available": None}}), CLUSTER)


def test_errors_come_first_and_all_of_it_is_json():
    seen = hosts(h2={"versions": facts()["versions"] | {"tensorflow": "2.20.0"}}, clock=60.0)
    found = findings_of(seen, CLUSTER)
    assert [finding.level for finding in found] == ["error", "warning"]
    told = json.loads(json.dumps(as_json(seen, found)))
    assert not told["ok"]
    assert [host["name"] for host in told["hosts"]] == [HERE, "h1", "h2"]
    assert told["hosts"][2]["ports"] == {"worker:0": {"port": 2222}, "ps:0": {"port": 2223}}
    assert told["findings"][0]["code"] == "wrong-version"
    assert as_json(seen, found[1:])["ok"]


def test_another_backend_of_keras_is_an_error():
    found = only(hosts(h1={"keras_backend": ["jax", "KERAS_BACKEND"], "imported": {"error": "No module named 'jax'"}}))
    assert told(found) == ("keras-backend", "error", "h1")
    assert found.message.startswith("KERAS_BACKEND ")
    assert " jax" in found.message
