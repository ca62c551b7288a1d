"""A real Slurm cluster on this machine: munged, slurmctld, and a slurmd per node, each in a process namespace.

Killing a node kills all of its processes. All nodes resolve each other's names, as on a cluster. The programs are
Debian's `slurm-wlm` and `munge`. It needs root.
"""

import os
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare")
CONFIGURATION = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1
ReturnToService=2
KillWait=20
SlurmctldTimeout=10
SlurmdTimeout=6
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs=4 RealMemory=4000 Gres=gpu:2
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
GPUS = (0, 1)
"""The ids of each node's GPUs, which have no real devices."""
NODE = """
mount --bind "$1/hosts" /etc/hosts && slurmd -D -N "$2"
exit
"""


def missing():
    """Why Slurm cannot run here; empty if it can."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if absent:
        return f"needs {', '.join(absent)} (Debian: slurm-wlm, munge)"
    tried = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False)
    return "" if os.geteuid() == 0 and tried.returncode == 0 else "needs root, and namespaces"


PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


@dataclass
class Lab:
    """A cluster of nodes n1, n2, …

    Args:
        folder: the folder of its state.
        nodes: the number of nodes.
    """

    folder: Path
    nodes: int = 4
    processes: dict = field(default_factory=dict)

    @property
    def env(self):
        """The environment of its users."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH}

    def __enter__(self):
        with ExitStack() as failed:
            failed.callback(self.close)
            self._write()
            key = f"--key-file={self.folder}/key"
            self._start("munged", "munged", "--foreground", "--force", key, f"--socket={self.folder}/munge.sock",
                        f"--pid-file={self.folder}/munged.pid", f"--seed-file={self.folder}/seed")  # fmt: skip
            self._await((self.folder / "munge.sock").exists, "munged")
            self._start("slurmctld", "slurmctld", "-D")
            for number in range(1, self.nodes + 1):
                self.start_node(f"n{number}")
            self._await(self._is_idle, "slurmctld")
            failed.pop_all()
        return self

    def __exit__(self, *_):
        self.close()

    def start_node(self, name):
        """Starts a node's slurmd."""
        (self.folder / f"spool.{name}").mkdir(exist_ok=True)
        self._start(name, "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
                    "sh", "-c", NODE, "sh", str(self.folder), name)  # fmt: skip

    def kill_node(self, name):
        """Kills a node, as a power failure does."""
        self.processes[name].kill()
        self.processes.pop(name).wait(10)

    def run(self, *argv):
        """Runs one of Slurm's programs."""
        done = subprocess.run(argv, env=os.environ | self.env, capture_output=True, text=True, check=False, timeout=30)
        assert done.returncode == 0, (argv, done.stderr)
        return done.stdout

    def close(self):
        """Stops all programs; a node's tasks are killed with it."""
        for name in [name for name in self.processes if name.startswith("n")]:
            self.kill_node(name)
        for process in reversed(self.processes.values()):
            process.terminate()
            process.wait(20)
        self.processes.clear()

    def _write(self):
        (self.folder / "state").mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)  # munged refuses a key that others could replace
        (self.folder / "key").write_bytes(os.urandom(128))
        (self.folder / "key").chmod(0o400)
        names = "".join(f"127.0.1.{number} n{number}\n" for number in range(1, self.nodes + 1))
        (self.folder / "hosts").write_text(Path("/etc/hosts").read_text() + names)
        control, *ports = _free_ports(1 + self.nodes)
        text = CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0],
            folder=self.folder,
            control=control,
            nodes=self.nodes,
            ports=f"[{','.join(map(str, ports))}]",
        )
        (self.folder / "slurm.conf").write_text(text)
        for gpu in GPUS:
            (self.folder / f"nvidia{gpu}").symlink_to("/dev/null")  # Slurm requires a device file
        devices = f"{self.folder}/nvidia[{','.join(map(str, GPUS))}]"
        (self.folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={devices}\n")

    def _start(self, name, *argv):
        with (self.folder / f"{name}.out").open("ab") as out:
            self.processes[name] = subprocess.Popen(
                argv, env=os.environ | self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def _is_idle(self):
        argv = ["sinfo", "--noheader", "--format=%T %D"]
        done = subprocess.run(argv, env=os.environ | self.env, capture_output=True, text=True, check=False)
        return done.stdout.split() == ["idle", str(self.nodes)]

    def _await(self, condition, name):
        """Polls a condition that nothing announces."""
        deadline = time.monotonic() + 20
        while not condition():
            log = (self.folder / f"{name}.out").read_text(errors="replace")[-2000:]
            assert time.monotonic() < deadline, f"{name} did not start:\n{log}"
            assert self.processes[name].poll() is None, f"{name} has exited:\n{log}"
            time.sleep(0.1)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """A cluster of four nodes, shared by all tests."""
    if why := missing():
        pytest.skip(why)
    with Lab(tmp_path_factory.mktemp("slurm")) as lab:
        yield lab


def _free_ports(count):
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]
