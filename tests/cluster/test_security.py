"""What docs/how-to/secure-ports.md recommends, carried out on hosts from the text of the page itself."""

import re
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.lab.hosts import ROOT, missing
from tests.support.launching import launch, project
from tests.support.tasks import ROLE, plain_environment

WITHOUT = missing() or ("" if shutil.which("nft") else "firewalls need nft: apt-get install nftables")
TUNNELS = [name for name in ("wg-quick", "wireguard-go") if shutil.which(name) is None]
needs_wireguard = pytest.mark.skipif(
    bool(TUNNELS) or not Path("/dev/net/tun").exists(),
    reason=f"WireGuard needs {', '.join(TUNNELS) or '/dev/net/tun'}: apt-get install wireguard-tools wireguard-go",
)
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300), pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT)]
RECIPE_YAML = "module: four_classes\ntrain: {epochs: 2, batch_size: 16}\n"
STEPS = 64
VARIABLES = 4 * (8 * 16 + 16 + 16 * 4 + 4)
"""Bytes of the recipe's variables."""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], sys.argv[2]), timeout=float(sys.argv[3]))"
LISTEN = """
import signal, socket, sys
servers = [socket.create_server(("", int(port)), family=socket.AF_INET6, dualstack_ipv6=True) for port in sys.argv[1:]]
print("listening", flush=True)
signal.pause()
"""


def block(words):
    """The one block of the page with these words in it: a fenced one, or an indented one."""
    page = (ROOT / "docs" / "how-to" / "secure-ports.md").read_text(encoding="utf-8")
    fenced = re.findall(r"```\w+\n(.*?)```", page, re.DOTALL)
    indented = [text.replace("\n    ", "\n") for text in re.findall(r"\n(?:\n    .*|\n(?=\n))+\n", page)]
    (found,) = (text for text in fenced + indented if words in text)
    return found


def filled(text, values):
    """A text with the page's names and addresses replaced by those of the hosts."""
    return re.sub("|".join(map(re.escape, values)), lambda found: values[found[0]], text)


def reaches(host, address, port):
    """Whether a host gets a connection; the kernel of the other answers at once, and what it drops stays unanswered."""
    command = host.command(sys.executable, "-c", CONNECT, address, port, 0.5)
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    assert tried.returncode == 0 or tried.stderr.strip().endswith("TimeoutError: timed out"), tried.stderr
    return tried.returncode == 0


@contextmanager
def listening(host, *ports):
    """Servers there, on all interfaces as TensorFlow's are."""
    with host.running(sys.executable, "-c", LISTEN, *ports, ready="listening"):
        yield


@contextmanager
def started(argv, output):
    """A program that is ended with its test."""
    with output.open("w") as log:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=plain_environment())
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def carried_out(script, *hosts, undone="nft delete table inet tfdist"):
    """A script on some hosts, undone at the end."""
    with ExitStack() as stack:
        for host in hosts:
            host.shell(script)
            stack.callback(host.shell, undone)
        yield


def test_the_rule_for_one_machine(lab):
    """Others are kept out; what comes from the machine itself passes, and so do answers to what it asks others."""
    machine, other, _ = lab.hosts
    with listening(machine, 2222, 40000), listening(other, 2222):
        assert reaches(other, machine.address, 2222)
        with carried_out(block("ct state new"), machine):
            assert not reaches(other, machine.address, 2222)
            assert not reaches(other, machine.address, 40000)
            assert reaches(machine, "127.0.0.1", 2222)
            assert reaches(machine, machine.address, 40000)
            assert reaches(machine, other.address, 2222)
            assert reaches(other, machine.address, 22)


def test_the_rules_for_several_machines(lab):
    """The first two are the cluster; the third is a foreign host, and so is every client over IPv6."""
    first, second, stranger = lab.hosts
    rules = filled(block("ip saddr !="), {"10.0.0.1": first.address, "10.0.0.2": second.address, ", 10.0.0.3": ""})
    for number, host in enumerate((first, second), 1):
        host.shell(f"ip address add fd00::{number}/64 dev eth0 nodad")
    with listening(first, 2222):
        assert reaches(stranger, first.address, 2222)
        assert reaches(second, "fd00::1", 2222)
        with carried_out(rules, first, second):
            assert not reaches(stranger, first.address, 2222)
            assert not reaches(second, "fd00::1", 2222)
            assert reaches(second, first.address, 2222)
            assert reaches(first, "127.0.0.1", 2222)
            assert reaches(first, "::1", 2222)


@pytest.fixture
def wireguard(lab):
    """The first two hosts, with WireGuard's keys and configuration as the page has them, in folders of their own."""
    hosts = lab.hosts[:2]
    own = "/etc/wireguard /run/wireguard"
    with carried_out(
        f"for at in {own}; do mkdir -p $at; mount -t tmpfs tmpfs $at; done", *hosts, undone=f"umount -l {own}"
    ):
        public = [host.shell(block("wg genkey")).strip() for host in hosts]
        for mine, theirs in ((0, 1), (1, 0)):
            values = {"10.9.0.1": f"10.9.0.{mine + 1}", "10.9.0.2": f"10.9.0.{theirs + 1}"}
            values |= {"(host 2's)": public[theirs], "host2.example.org": hosts[theirs].address}
            text = filled(block("[Interface]"), values)
            hosts[mine].shell(f"cat > /etc/wireguard/tfdist.conf <<end\n{text}\nend")
        yield hosts


@pytest.mark.rotates(5, 1)
@needs_wireguard
def test_a_network_of_their_own(lab, wireguard, tmp_path):
    """Its members alone reach the ports; and a training needs no other way, since the hosts then have none but ssh."""
    first, second = wireguard
    stranger = lab.hosts[2]
    python = f"ssh: {{config: {lab.config}, python: {sys.executable}}}\n"
    values = {"host1.example.org": first.name, "host2.example.org": second.name, "../recipes/digits_mlp": "recipe"}
    cluster = filled(block("reachable_as"), values) + python
    folder = project(tmp_path / "project", cluster=cluster, recipe_yaml=RECIPE_YAML)
    with ExitStack() as stack:
        with listening(first, 2222):
            assert reaches(stranger, first.address, 2222)
            undone = "wg-quick down tfdist; nft delete table inet tfdist"
            stack.enter_context(carried_out(block("wg-quick up"), first, second, undone=undone))
            assert not reaches(stranger, first.address, 2222)
            assert reaches(second, "10.9.0.1", 2222)
        for host in (first, second):
            host.shell("nft add rule inet tfdist input iifname eth0 tcp dport != 22 drop")
        launched = launch(folder)
        assert launched.code == 0, launched.stderr
        assert launched.report["step"] == STEPS
        received, sent = map(int, first.shell("wg show tfdist transfer").split()[1:])
    assert received > STEPS * VARIABLES, "the worker's gradients"
    assert sent > STEPS * VARIABLES, "the values of the variables"
    lab.wait_until_empty(10)


@pytest.mark.rotates(5, 4)
def test_tunnels_of_ssh(lab, tmp_path):
    """The chief and the ps here, which is the first host, and the worker there: all end by themselves."""
    here, there, _ = lab.hosts
    cluster = block('"127.0.0.1:2224"').replace("../recipes/digits_mlp.yaml", "recipe.yaml")
    folder = project(tmp_path / "project", cluster=cluster, recipe_yaml=RECIPE_YAML)
    tunnel = filled(block("ssh -N").strip(), {"ssh": f"exec ssh -F {lab.config}", "host2": there.name})
    argv = [*ROLE, "--cluster", folder / "cluster.yaml", "--run-dir", tmp_path / "run", "--task"]
    with ExitStack() as stack:
        through = stack.enter_context(started(here.command("sh", "-c", tunnel), tmp_path / "tunnel"))
        tasks = {
            task: stack.enter_context(started(host.command(*argv, task), tmp_path / task))
            for task, host in (("worker:0", there), ("chief:0", here), ("ps:0", here))
        }
        for task, process in tasks.items():
            assert process.wait(100) == 0, (tmp_path / task).read_text()
        assert through.poll() is None, "it stays"
    assert f"step {STEPS}/{STEPS}" in (tmp_path / "chief:0").read_text()
