"""Hosts on one machine, for tests over ssh: network namespaces, each with an address, a name and an sshd.

They share the file system, but have separate home folders, and `Lab.here` is empty on each host. They need root, `ip`
and `sshd`.
"""

import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
SSHD_CONFIG = """
HostKey {folder}/hostkey
AuthorizedKeysFile {folder}/id.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PidFile none
MaxStartups 100:30:200
"""
SSH_CONFIG = """
Host {prefix}*
  User root
  IdentityFile {folder}/id
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking no
  LogLevel ERROR
"""


def missing():
    """Why such hosts cannot be created here; empty if they can."""
    if sys.platform != "linux" or os.geteuid():
        return "hosts need root on Linux"
    programs = [name for name in ("ip", "ssh", "ssh-keygen", "unshare") if shutil.which(name) is None]
    programs += [] if Path(SSHD).exists() else ["sshd"]
    if programs:
        return f"hosts need {', '.join(programs)}: apt-get install openssh-server openssh-client iproute2"
    name = f"tfp{os.getpid()}"
    for add, remove in (
        (["netns", "add", name], ["netns", "delete", name]),
        (["link", "add", name, "type", "bridge"], ["link", "delete", name]),
        (["link", "add", name, "type", "veth", "peer", "name", f"{name}x"], ["link", "delete", name]),
    ):
        tried = subprocess.run(["ip", *add], capture_output=True, text=True, check=False)
        if tried.returncode:
            return f"hosts need `ip {' '.join(add)}`: {tried.stderr.strip()}"
        ip(*remove)
    return ""


def ip(*arguments):
    subprocess.run(["ip", *map(str, arguments)], check=True, capture_output=True)


@dataclass
class Host:
    """One host.

    Args:
        name: its name in the lab's configuration of `ssh`, and that of its namespace.
        address: its IP address.
        home: its home folder.
        link: the name of the outer end of its virtual cable.
    """

    name: str
    address: str
    home: Path
    link: str
    sshd: subprocess.Popen = field(repr=False)

    def cut(self):
        """Disconnects the cable."""
        ip("link", "set", self.link, "down")

    def mend(self):
        """Connects the cable again."""
        ip("link", "set", self.link, "up")

    def command(self, *argv):
        """The command that runs a program on the host: in its network, and with its mounts."""
        return ["nsenter", "--net", "--mount", "--uts", f"--target={self.sshd.pid}", *map(str, argv)]

    def shell(self, script):
        """Runs a shell script on the host, which has to succeed, and returns its output."""
        done = subprocess.run(self.command("sh", "-ec", script), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{script}\n{done.stderr}"
        return done.stdout

    @contextmanager
    def running(self, *argv, ready=""):
        """Runs a program on the host; yields when it has written its first line."""
        process = subprocess.Popen(self.command(*argv), stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout.readline().strip() == ready
            yield
        finally:
            process.kill()
            process.communicate()

    def processes(self):
        """The processes on the host except its sshd: (pid, command line)."""
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        pids = {int(line) for line in listed.stdout.split()} - {self.sshd.pid}
        return [(pid, command) for pid in sorted(pids) if (command := _command(pid))]


@dataclass
class Lab:
    """Hosts that can connect to one another, and that this machine can connect to.

    Args:
        config: a configuration of `ssh` with these hosts.
        here: a folder of this machine that is empty on each host.
        hosts: the hosts.
    """

    config: Path
    here: Path
    hosts: list[Host]

    def processes(self):
        """The processes on all hosts."""
        return [process for host in self.hosts for process in host.processes()]

    def wait_until_empty(self, seconds):
        """Waits until no process is left on the hosts, and returns the seconds it took."""
        began = time.monotonic()
        while left := self.processes():
            assert time.monotonic() - began < seconds, left
            time.sleep(0.1)
        return time.monotonic() - began


def _command(pid):
    """The command line of a process; empty if it has exited."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


@contextmanager
def make_hosts(folder, count):
    """Creates hosts, and removes them at the exit.

    Args:
        folder: the folder of keys, configurations and homes; a path without spaces.
        count: the number of hosts.
    """
    number = os.getpid() % 16384
    network, prefix = f"10.{64 + number // 256}.{number % 256}", f"tfh{os.getpid()}-"
    for key in ("hostkey", "id"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    (folder / "here").mkdir()
    (folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=folder))
    Path("/run/sshd").mkdir(exist_ok=True)
    bridge = f"tfb{os.getpid()}"
    with ExitStack() as made:
        ip("link", "add", bridge, "type", "bridge")
        made.callback(ip, "link", "delete", bridge)
        ip("address", "add", f"{network}.254/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        config = SSH_CONFIG.format(folder=folder, prefix=prefix)
        hosts = []
        for index in range(1, count + 1):
            hosts.append(_make_host(made, folder, f"{prefix}{index}", f"{network}.{index}", bridge))
            config += f"Host {prefix}{index}\n  HostName {network}.{index}\n"
        (folder / "ssh_config").write_text(config)
        lab = Lab(folder / "ssh_config", folder / "here", hosts)
        for host in hosts:
            _await_ssh(lab, host)
        yield lab


def _make_host(made, folder, name, address, bridge):
    ip("netns", "add", name)
    made.callback(ip, "netns", "delete", name)
    link = f"tfv{name.removeprefix('tfh')}"
    ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
    made.callback(ip, "link", "delete", link)  # deleted with its namespace too, but later
    ip("link", "set", link, "master", bridge, "up")
    ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
    for device in ("eth0", "lo"):
        ip("-n", name, "link", "set", device, "up")
    home = folder / name
    home.mkdir()
    options = ["-o", f"ListenAddress={address}", "-o", f"SetEnv=HOME={home} PYTHONPATH={ROOT}"]
    sshd = [
        SSHD,
        "-D",
        "-e",
        "-f",
        folder / "sshd_config",
        "-p",
        "22",
        *options,
    ]
    script = f'hostname {name} && mount -t tmpfs tmpfs {folder}/here && exec "$@"'
    start = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", script, "sh", *sshd]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(list(map(str, start)), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    host = Host(name, address, home, link, process)
    made.callback(_end, host)
    return host


def _end(host):
    host.sshd.kill()
    host.sshd.wait()
    for pid, _ in host.processes():
        subprocess.run(["kill", "-KILL", str(pid)], check=False, capture_output=True)


def _await_ssh(lab, host):
    deadline = time.monotonic() + 20
    while subprocess.run(["ssh", "-F", lab.config, host.name, "true"], check=False, capture_output=True).returncode:
        assert time.monotonic() < deadline, f"{host.name} does not answer"
        time.sleep(0.05)
