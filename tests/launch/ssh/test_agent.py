"""The agent, with the test in place of the launcher."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from tfdist_cli.launch.ssh.files import Entry, FileList
from tfdist_cli.launch.ssh.frames import Channel, ConnectionEnded, Frame
from tfdist_cli.launch.ssh.paths import PathMap, files_at, task_at
from tfdist_cli.launch.supervisor.events import StopSignal
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import make_plan
from tfdist_cli.spec.address import Address

pytestmark = pytest.mark.slow
AGENT = "from tfdist_cli.launch.ssh import agent; agent.PING_TIMEOUT = {timeout}; agent.GRACE = 0.5; agent.main()"


class Agent(Channel):
    """A running agent, and the launcher's end of the connection."""

    def __init__(self, timeout):
        argv = [sys.executable, "-c", AGENT.format(timeout=timeout)]
        self.popen = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.left = []
        """Processes that the test kills if the agent has not."""
        super().__init__(self.popen.stdout, os.fdopen(os.dup(self.popen.stdin.fileno()), "wb", buffering=0))
        self.popen.stdin.close()
        self.await_greeting()
        assert self.read().kind == "hello"

    def end(self):
        """Ends the connection, and waits for the agent."""
        self.close()
        self.popen.wait(10)

    def next(self, kind):
        """The next frame of a kind."""
        while (frame := self.read()).kind != kind:
            pass
        return frame

    def rest(self):
        """The kinds of the frames until the end."""
        kinds = []
        with suppress(ConnectionEnded):
            while True:
                kinds.append(self.read().kind)
        return kinds


@pytest.fixture
def begin(make_cluster, tmp_path):
    """Starts an agent, and a shell script in its one task."""
    begun = []
    cluster = make_cluster("single", hosts=["h1"], chief=1)
    [task] = cluster.tasks

    def begin(script="exec sleep 1000", *words, timeout=60, start=tmp_path, tells_metrics=False):
        agent = Agent(timeout)
        begun.append(agent)
        run_dir, command = tmp_path / "run", ("sh", "-c", script, "sh", *words)
        addresses = {task: Address("127.0.0.1", 2222)}
        plan = make_plan(cluster, None, addresses=addresses, run_dir=run_dir, machine=Machine(1), command=command)
        agent_plan = {
            "run_dir": str(run_dir),
            "files": files_at(plan, PathMap()),
            "tasks": [task_at(plan.tasks[0], PathMap(), sys.executable)],
            "start": str(start),
            "copied": True,
            "tells_metrics": tells_metrics,
        }
        agent.write(Frame("plan", agent_plan))
        env = {"TFDIST_TASK_DIR": str(run_dir / "task")}
        agent.write(Frame("start", {"task": str(task), "attempt": 1, "env": env}))
        return agent

    yield begin
    for agent in begun:
        agent.popen.kill()
        agent.popen.wait()
        for pid in filter(is_alive, agent.left):
            os.kill(pid, signal.SIGKILL)


def is_alive(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_a_launcher_without_pings_receives_nothing_more(begin):
    """A launcher that was stopped for long has lost the host, and must not receive the exits of its tasks."""
    agent = begin(timeout=0.5)
    pid = agent.next("started")["pid"]
    assert agent.rest() == []
    assert agent.popen.wait(10) == 0
    assert not is_alive(pid)


def test_an_agent_whose_frames_are_not_read_exits(begin):
    agent = begin("trap '' TERM; while :; do echo a line of some length that fills a pipe; done", timeout=1)
    pid = agent.next("started")["pid"]
    agent.popen.wait(10)
    assert not is_alive(pid)


@pytest.mark.parametrize("running", [True, False])
def test_child_processes_of_a_task_are_killed_with_the_agent(begin, running):
    stubborn, tame = "trap '' TERM; echo $$; while :; do sleep 0.1; done", "echo $$; exec sleep 1000"
    agent = begin('setsid sh -c "$1" & setsid sh -c "$2" & exec sleep 1000', stubborn, tame)
    output = b""
    while output.count(b"\n") < 2:
        output += agent.next("output").payload
        agent.left = [int(pid) for pid in output.split()]
    if not running:
        agent.write(Frame("end", {"task": "chief:0", "how": StopSignal.TERMINATE.value}))
        agent.next("exited")
    assert all(map(is_alive, agent.left))
    agent.end()
    assert not any(map(is_alive, agent.left))


def test_metrics_are_sent_from_the_beginning_and_again_when_the_file_is_replaced(begin, tmp_path):
    (tmp_path / "run").mkdir()
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text("1\n2\n3")

    def received():
        frame = agent.next("metrics")
        return frame["anew"], frame.payload

    agent = begin(tells_metrics=True)
    assert received() == (True, b"1\n2\n")
    with metrics.open("a") as file:
        file.write("\n4\n")
    assert received() == (False, b"3\n4\n")
    for lines in ("1\n", "1\n2\n3\n4\n5\n", ""):
        (tmp_path / "new").write_text(lines)
        (tmp_path / "new").replace(metrics)
        assert received() == (True, lines.encode())
    agent.end()


def test_programs_start_in_a_folder_without_copied_files(begin, tmp_path):
    agent = begin("pwd", start=tmp_path / "p" / "out")
    assert agent.next("output").payload == f"{tmp_path}/p/out\n".encode()
    agent.end()


def test_an_incomplete_file_is_removed_when_the_launcher_exits(begin, tmp_path):
    agent = Agent(60)
    to = tmp_path / "to"
    listed = FileList("here", (Entry("p/large", 10, 1, 0o644),))
    agent.write(Frame("copy", {"to": str(to), **listed.as_json()}))
    assert agent.read()["wanted"] == [0]
    agent.write(Frame("piece", {"file": 0, "last": False}, b"part"))
    agent.end()
    assert [path.name for path in (to / "p").iterdir()] == []
