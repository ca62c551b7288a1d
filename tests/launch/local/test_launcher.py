"""Real processes of this machine: how they end, what they leave behind, what they write."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support import profiled
from tfdist_cli.launch.local import launcher
from tfdist_cli.launch.process import process, stream
from tfdist_cli.launch.supervisor.events import Exited, Output, RecordReceived, SignalReceived, Started
from tfdist_cli.launch.supervisor.state import Status
from tfdist_cli.spec.task_id import TaskId

W0, W1 = TaskId("worker", 0), TaskId("worker", 1)


def python(code):
    return sys.executable, "-c", textwrap.dedent(code)


def when_says(text, *answers):
    """Answers once to a line of any task."""
    left = list(answers)

    def react(event, state):
        if isinstance(event, Output) and text in event.lines and left:
            answers, left[:] = tuple(left), []
            return answers
        return ()

    return react


def is_alive(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize(
    ("script", "code", "expected"),
    [("exit 0", 0, 0), ("exit 3", 3, 3), ("kill -TERM $$", -15, 143), ("kill -KILL $$", -9, 137)],
)
def test_how_a_task_ends(run, script, code, expected):
    outcome = run("sh", "-c", script)
    assert outcome.of(Exited) == [Exited(W0, code)]
    assert outcome.state.exit_code == expected


def test_a_task_gets_the_order_to_profile_itself(run, tmp_path):
    outcome = run("sh", "-c", profiled.SCRIPT, react=profiled.order_when_ready(W0))
    assert outcome.of(RecordReceived) == [RecordReceived(W0, {"kind": "profiled", "request": "a"})]
    assert outcome.state.exit_code == 0


@pytest.mark.parametrize(("program", "code"), [("/nonexistent/program", 127), ("/", 126), (__file__, 126)])
def test_a_program_that_cannot_be_started(run, program, code):
    outcome = run(program)
    assert outcome.state.exit_code == code
    assert f"tfdist: {program} cannot be started" in outcome.logs[W0, "stderr"].decode()
    assert outcome.lines(stream="stderr")


def test_environment(run, monkeypatch):
    monkeypatch.setenv("FROM_SHELL", "1")
    outcome = run("sh", "-c", 'echo $FROM_SHELL $OWN "$TF_CONFIG"')
    assert outcome.lines()[0].startswith('1 worker:0 1 {"cluster"')


def test_a_task_has_no_input(run):
    assert run("cat").state.exit_code == 0


def test_a_task_is_in_a_session_of_its_own(run):
    code = "import os; print(os.getsid(0) == os.getpid() == os.getpgid(0))"
    assert run(*python(code)).lines() == ["True"]


def test_streams_are_kept_apart_and_logged_as_they_came(run):
    outcome = run("sh", "-c", r"""printf 'a\n\377b\r\nlast'; printf 'err\n\036{"kind":"state"}\nmore\n' >&2""")
    assert outcome.logs[W0, "stdout"] == b"a\n\xffb\r\nlast"
    assert outcome.lines() == ["a", "�b", "last"]
    assert outcome.logs[W0, "stderr"] == b"err\nmore\n"
    assert outcome.lines(stream="stderr") == ["err", "more"]
    assert outcome.of(RecordReceived) == [RecordReceived(W0, {"kind": "state"})]


def test_everything_a_task_wrote_is_heard_before_its_end(run):
    outcome = run("sh", "-c", "seq 1 20000; seq 20001 30000 >&2; exit 5")
    assert outcome.lines() == [str(number) for number in range(1, 20001)]
    assert outcome.lines(stream="stderr") == [str(number) for number in range(20001, 30001)]
    assert isinstance(outcome.events[-1], Exited)


def test_children_that_a_task_leaves_behind_are_ended(run):
    outcome = run("sh", "-c", "sleep 1000 & echo $!")
    assert outcome.state.exit_code == 0
    assert not is_alive(int(outcome.lines()[0]))


def test_children_that_ignore_sigterm_are_killed(run, monkeypatch):
    monkeypatch.setattr(process, "_LEFTOVER_SECONDS", 0.1)
    code = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = os.fork()
        if child:
            print(child)
        else:
            time.sleep(1000)
    """
    outcome = run(*python(code))
    assert outcome.state.exit_code == 0
    assert not is_alive(int(outcome.lines()[0]))


def test_a_shell_that_ends_at_once_does_not_take_the_time_to_save_from_its_child(run):
    code = """
        import signal, sys, time
        def save(*_):
            time.sleep(0.3)
            print("saved", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("ready", flush=True)
        signal.pause()
    """
    outcome = run(
        "sh", "-c", '"$@" & wait', "sh", *python(code), react=when_says("ready", SignalReceived(signal.SIGTERM))
    )
    assert "saved" in outcome.lines()
    assert outcome.state.exit_code == 143


def test_a_child_that_is_started_after_its_group_was_reported_is_ended_too(run):
    code = """
        import os, signal, subprocess, sys, time
        def start_another(*_):
            os.write(1, b"%d\\n" % subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL).pid)
            sys.exit(0)
        signal.signal(signal.SIGTERM, start_another)
        os.write(1, b"ready\\n")
        time.sleep(1000)
    """
    outcome = run(*python(code), react=when_says("ready", SignalReceived(signal.SIGTERM)))
    assert outcome.of(Exited) == [Exited(W0, 0)]  # long before the shutdown timeout's SIGKILL
    assert not is_alive(int(outcome.lines()[1]))


def test_a_daemon_that_has_left_the_group_is_not_waited_for(run, monkeypatch):
    monkeypatch.setattr(stream, "_PATIENCE", 0.1)
    code = """
        import os
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.setsid()
            print(os.getpid(), flush=True)
            os.write(writing, b"left")
            os.execvp("sleep", ["sleep", "1000"])
        os.read(reading, 4)
    """
    alive = []

    def react(event, state):
        if isinstance(event, Exited):
            alive.append(is_alive(int(outcome_lines[0])))
        if isinstance(event, Output):
            outcome_lines.extend(event.lines)
        return ()

    outcome_lines = []
    outcome = run(*python(code), react=react)
    assert outcome.state.exit_code == 0
    assert alive == [True]


def test_tasks_that_exit_together_are_searched_for_orphans_together(run, make_cluster, monkeypatch):
    searches = []
    monkeypatch.setattr(launcher, "reap_orphans", searches.append)
    outcome = run("true", cluster=make_cluster(worker=12))
    assert len(outcome.of(Exited)) == 12
    assert len(searches) <= 4


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere the system adopts orphans")
@pytest.mark.slow
def test_what_a_task_leaves_behind_in_sessions_of_its_own_ends_with_the_run(run):
    """Also what ignores SIGTERM, and the children of what is left; what was there before stays."""
    code = """
        import subprocess
        tame, stubborn = "echo $$; exec sleep 1000", "trap '' TERM; echo $$; while :; do sleep 0.1; done"
        for script in (tame, stubborn, f"setsid sh -c '{tame}' & wait"):
            left = subprocess.Popen(["sh", "-c", script], start_new_session=True, stdout=subprocess.PIPE)
            print(left.pid, int(left.stdout.readline()), flush=True)
    """
    other = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        outcome = run(*python(code))
        assert outcome.state.exit_code == 0
        left = [int(pid) for line in outcome.lines() for pid in line.split()]
        assert len(set(left)) == 4
        assert not any(map(is_alive, left))
        assert is_alive(other.pid)
    finally:
        other.kill()
        other.wait()


def test_temporary_files_of_tasks_are_exited_after_the_run(run, make_cluster, tmp_path, monkeypatch):
    """TensorFlow's AutoGraph leaves a file for each function that it converts."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code = """
        import os, tempfile
        os.mkdir(os.path.join(tempfile.mkdtemp(), "below"))
        file = tempfile.NamedTemporaryFile(delete=False)
        print(os.path.dirname(file.name))
    """
    outcome = run(*python(code), cluster=make_cluster(worker=2))
    assert outcome.state.exit_code == 0
    assert outcome.lines(W0) == outcome.lines(W1)
    assert Path(outcome.lines(W0)[0]).parent == tmp_path
    assert not list(tmp_path.glob("tfdist-*"))


def test_a_role_may_name_its_own_temporary_folder(run, make_cluster, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    code = "import tempfile; print(tempfile.NamedTemporaryFile(delete=False).name)"
    outcome = run(*python(code), cluster=make_cluster(worker={"env": {"TMPDIR": str(own)}}))
    assert [Path(line) for line in outcome.lines()] == list(own.iterdir())


def test_a_task_that_ignores_sigterm_is_killed_with_its_children(run):
    script = "trap '' TERM; sleep 1000 & echo $!; echo ready; wait; wait; while true; do sleep 1; done"
    outcome = run("sh", "-c", script, shutdown=0.2, react=when_says("ready", SignalReceived(signal.SIGTERM)))
    assert outcome.of(Exited) == [Exited(W0, -9)]
    assert outcome.state.exit_code == 143
    assert not is_alive(int(outcome.lines()[0]))


def test_a_second_interrupt_kills_at_once(run):
    interrupt = SignalReceived(signal.SIGINT)
    outcome = run("sh", "-c", "trap '' TERM; echo ready; sleep 1000", react=when_says("ready", interrupt, interrupt))
    assert outcome.of(Exited) == [Exited(W0, -9)]
    assert outcome.state.exit_code == 130


def test_signals_to_the_launcher_reach_the_queue(run):
    def react(event, state):
        if isinstance(event, Started):
            os.kill(os.getpid(), signal.SIGTERM)

    outcome = run("sleep", "1000", react=react)
    assert outcome.of(SignalReceived) == [SignalReceived(signal.SIGTERM)]
    assert outcome.state.exit_code == 143


def test_the_first_failure_ends_the_others(run, make_cluster):
    script = "case $TF_CONFIG in *'\"index\":1'*) exit 7;; *) sleep 1000;; esac"
    outcome = run("sh", "-c", script, cluster=make_cluster(worker=3))
    assert outcome.state.exit_code == 7
    assert outcome.state.failures == (W1,)
    assert outcome.state.tasks[W0].status is Status.STOPPED


def test_a_worker_that_follows_its_chief_out_has_not_left_it_alone(run, make_cluster, tmp_path):
    """The chief holds a lock for as long as it lives; the others end as soon as it is free."""
    lock = tmp_path / "lock"
    code = f"""
        import fcntl, json, os
        role = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
        ready = {str(tmp_path)!r}
        file = open({str(lock)!r}, "w")
        if role == "chief":
            fcntl.flock(file, fcntl.LOCK_EX)
            open(ready + "/locked", "w")
            while sum(name.startswith("waits") for name in os.listdir(ready)) < 5: pass
            os._exit(0)
        while not os.path.exists(ready + "/locked"): pass
        open(ready + "/waits" + str(os.getpid()), "w")
        fcntl.flock(file, fcntl.LOCK_EX)
        os._exit(1)
    """
    outcome = run(*python(code), cluster=make_cluster("parameter_server", chief=1, worker=4, ps=1))
    assert outcome.state.exit_code == 0
    assert outcome.state.failures == ()


def test_a_flood_is_heard_whole_and_takes_no_memory(run):
    lines = 400_000
    counts = []
    memory = []

    def react(event, state):
        counts.append(len(event.lines) if isinstance(event, Output) else 0)
        memory.append(psutil.Process().memory_info().rss)

    run(*python(f"import sys; sys.stdout.write(('x' * 99 + '\\n') * {lines})"), react=react, keep=False)
    assert sum(counts) == lines
    assert max(memory) - memory[0] < 30e6  # of the 40 MB that were written


def test_thirty_tasks(run, make_cluster):
    cluster = make_cluster("parameter_server", chief=1, worker=25, ps=4)
    script = 'case $TF_CONFIG in *\'"type":"chief"\'*) exit 0;; *) sleep 1000;; esac'
    outcome = run("sh", "-c", script, cluster=cluster)
    assert outcome.state.exit_code == 0
    assert len(outcome.of(Exited)) == 30


def test_whatever_is_left_when_the_launcher_breaks_is_killed(run):
    def react(event, state):
        if isinstance(event, Started):
            pids.append(event.pid)
            raise ZeroDivisionError("a bug")

    pids: list[int] = []
    with pytest.raises(ZeroDivisionError):
        run("sleep", "1000", react=react)
    assert not is_alive(pids[0])


def test_a_system_without_handles_on_processes(run, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    assert run("sh", "-c", "echo hi; exit 3").state.exit_code == 3
