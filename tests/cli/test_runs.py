"""`tfdist list`, `status`, `logs` and `stop`, of runs that are there."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.support.codes import codes_in
from tfdist_cli.cli import logs as cli_logs

CLUSTER = "strategy: parameter_server\nnetwork: host\nroles: {chief: {}, worker: {replicas: 2}, ps: {}}\n"
PROGRAM = "import os, time; print('hello from', os.environ['TF_CONFIG'][-30:], flush=True); time.sleep(600)"
SECONDS = 30


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """A launch in a process of its own, whose tasks have said hello."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    argv = [sys.executable, "-m", "tfdist_cli", "launch", "cluster.yaml", "--", sys.executable, "-c", PROGRAM]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    said = [process.stderr.readline() for _ in range(4)]
    assert all(b"hello from" in line for line in said), said
    yield process
    process.kill()
    process.wait()
    process.stderr.close()


def until(condition):
    """Waits for what another process does."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def stopped(*options):
    """What `stop` says: another process than the launcher's parent waits for it otherwise."""
    argv = [sys.executable, "-m", "tfdist_cli", "stop", *options]
    return subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, timeout=SECONDS).stdout.strip()


def told(tfdist):
    result = tfdist("status", "--json")
    assert result.code == 0
    return json.loads(result.out)


@pytest.mark.slow
def test_a_run_that_is_looked_at_and_stopped(tfdist, launched, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert json.loads(tfdist("list", "--json").out)[0]["run_dir"].rpartition("/")[2] in tfdist("list").out
    monkeypatch.setenv("COLUMNS", "150")
    news = told(tfdist)
    assert (news["state"], news["launcher"]) == ("running", launched.pid)
    pids = [task["pid"] for task in news["tasks"]]
    assert all(psutil.pid_exists(pid) for pid in pids)
    shown = tfdist("status").out
    assert f"worker:1 starting 1 thread pid {pids[2]}" in " ".join(shown.split())
    assert {(task["intra_op_threads"], *task["gpus"]) for task in news["tasks"] if "worker" in task["task"]} == {(1,)}
    assert "running (running) parameter_server" in shown
    assert "running" in tfdist("list").out
    logs = tfdist("logs", "--task", "worker:1").out
    assert logs.startswith("[worker:1] hello from")
    assert len(logs.splitlines()) == 1
    assert len(tfdist("logs").out.splitlines()) == 4

    assert stopped().endswith("has ended")
    assert launched.wait(SECONDS) == 143
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    news = told(tfdist)
    assert (news["state"], news["exit_code"], news["launcher"]) == ("stopped", 143, None)
    assert "stopped ended by SIGTERM" in " ".join(tfdist("status").out.split())
    assert stopped().endswith("is stopped already")


@pytest.mark.slow
def test_a_run_whose_launcher_is_gone(tfdist, launched):
    # The guard ends what a killed launcher leaves behind. Here it is gone as well.
    guard = next(each for each in psutil.Process(launched.pid).children() if "watchdog" in " ".join(each.cmdline()))
    pids = [task["pid"] for task in told(tfdist)["tasks"]]
    guard.kill()
    launched.send_signal(signal.SIGKILL)
    launched.wait(SECONDS)
    assert told(tfdist)["state"] == "lost"
    assert "; 4 of its tasks " in tfdist("status").out
    assert stopped().endswith("has ended")
    until(lambda: not any(_runs(pid) for pid in pids))


def _runs(pid):
    """Whether a process is there, which nobody may have reaped."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_at_once(launched):
    assert stopped("--now").endswith("has ended")
    assert launched.wait(SECONDS) == 130


@pytest.mark.slow
def test_following_ends_with_the_run(launched):
    follower = subprocess.Popen(
        [sys.executable, "-m", "tfdist_cli", "logs", "--follow"], stdout=subprocess.PIPE, text=True
    )
    first = follower.stdout.readline()
    launched.send_signal(signal.SIGTERM)
    rest = follower.stdout.read()  # `communicate` would not see what has been read with the first line
    assert follower.wait(SECONDS) == 0
    assert "hello from" in first
    assert rest.count("hello from") == 3


@pytest.fixture
def write(tmp_path):
    """Writes into the log of a worker, of a run that is over, in an attempt."""
    (tmp_path / "plan.json").write_text(json.dumps({"tasks": [{"task": "worker:0"}]}))

    def write(attempt, data):
        folder = tmp_path / f"attempt_{attempt}" / "worker-0"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "stderr.log").open("ab") as file:
            file.write(data)

    return write


def test_a_last_line_that_nothing_ends_is_shown(tfdist, write, tmp_path):
    write(1, b"first\nlast words")
    assert tfdist("logs", tmp_path).out == "[worker:0] first\n[worker:0] last words\n"
    assert tfdist("logs", tmp_path, "--lines", "1").out == "[worker:0] last words\n"


def test_what_a_task_is_writing_is_shown_of_a_run_that_goes_on(tfdist, write, tmp_path, monkeypatch):
    write(1, b"1/3\r2/3")
    monkeypatch.setattr(cli_logs, "launcher_of", lambda run: 4711)
    assert tfdist("logs", tmp_path).out == "[worker:0] 2/3\n"


def test_of_a_progress_bar_what_a_terminal_would_show(tfdist, write, tmp_path):
    write(1, b"1/3\r2/3\r3/3\nwindows\r\n")
    assert tfdist("logs", tmp_path).out == "[worker:0] 3/3\n[worker:0] windows\n"


def test_the_last_attempt_counts_unless_another_is_named(tfdist, write, tmp_path):
    for attempt in (2, 10):
        write(attempt, b"attempt %d\n" % attempt)
    assert tfdist("logs", tmp_path).out == "[worker:0] attempt 10\n"
    assert tfdist("logs", tmp_path, "--attempt", "2").out == "[worker:0] attempt 2\n"
    assert codes_in(tfdist("logs", tmp_path, "--attempt", "3").err) == ["no-logs"]


def test_following_leaves_out_nothing_between_two_attempts(tfdist, write, tmp_path, monkeypatch):
    """It looks at the files now and then: an attempt may end, and others begin, and even end, in between."""
    write(1, b"old\n")
    write(2, b"early\nlate\n")
    meanwhile = [
        [(2, b"beg")],
        [(2, b"un\nwhy it ended"), (3, b"third\n")],
        [(3, b"more\n"), (4, b"fourth"), (5, b"fif"), (5, b"th")],
    ]
    monkeypatch.setattr(cli_logs, "launcher_of", lambda run: 4711 if meanwhile else None)

    def sleep(seconds):
        for attempt, data in meanwhile.pop(0):
            write(attempt, data)

    monkeypatch.setattr(time, "sleep", sleep)
    said = tfdist("logs", tmp_path, "--follow", "--lines", "1").out.replace("[worker:0] ", "").splitlines()
    assert said == ["late", "begun", "why it ended", "third", "more", "fourth", "fifth"]


def test_a_run_is_a_line_whatever_ended_it(tfdist, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    for name, headline in (("short", None), ("a-much-longer-name", "chief:0 failed, " + "and so on " * 20)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "plan.json").write_text(json.dumps({"tasks": []}))
        (folder / "launcher.lock").touch()
        line = {"time": "2026-01-02T03:04:05+00:00", "seconds": 7.0, "attempt": 1, "event": "phase", "phase": "ended"}
        (folder / "events.jsonl").write_text(json.dumps(line))
        (folder / "result.json").write_text(json.dumps({"exit_code": 1 if headline else 0, "headline": headline}))
    lines = tfdist("list", tmp_path).out.splitlines()
    assert len(lines) == 2
    assert sorted(line.split()[0] for line in lines) == ["a-much-longer-name", "short"]
    assert sorted(line.split()[1] for line in lines) == ["done", "failed"]
    assert {line.index("2026-01-0") for line in lines} == {len("a-much-longer-name  failed  ")}


def test_a_run_that_cannot_be_read_is_named_and_hides_no_other(tfdist, tmp_path):
    for name, plan in (("whole", '{"tasks": []}'), ("cut", '{"tasks": [{"ta')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").write_text(plan)
    result = tfdist("list", tmp_path)
    assert result.code == 0
    assert result.out.split()[:2] == ["whole", "lost"]
    assert result.err.startswith(f"skipped: {tmp_path / 'cut'} ")
    assert "plan.json" in result.err


def test_what_a_task_says_of_itself_does_not_talk_to_the_terminal(tfdist, tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({"tasks": [{"task": "worker:0"}]}))
    line = {"time": "2026-01-02T03:04:05+00:00", "seconds": 7.0, "event": "state", "task": "worker:0"}
    (tmp_path / "events.jsonl").write_text(json.dumps(line | {"state": "\x1b[2Jtraining"}) + "\n")
    out = tfdist("status", tmp_path).out
    assert "worker:0  training" in out
    assert "\x1b" not in out


def test_nothing_to_show(tfdist, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert codes_in(tfdist("list").err) == ["no-such-file"]
    assert codes_in(tfdist("status").err) == ["not-a-run-dir"]
    (tmp_path / "runs").mkdir()
    result = tfdist("list")
    assert (result.code, result.out, result.err) == (0, "", "no runs in runs\n")


@pytest.mark.slow
def test_tasks_that_it_does_not_have(tfdist, launched):
    result = tfdist("logs", "--task", "worker:7")
    assert result.code == 2
    assert codes_in(result.err) == ["unknown-task"]
    assert codes_in(tfdist("logs", "-t", "boss").err) == ["invalid-task"]
    assert codes_in(tfdist("logs", "--attempt", "5").err) == ["no-logs"]
