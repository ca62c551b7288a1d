"""`tfdist list`, `status`, `logs` and `stop`, of runs that are there."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

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
    assert f"worker:1  starting  pid {pids[2]}" in shown
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
    assert stopped().endswith("is stopped already")


@pytest.mark.slow
def test_a_run_whose_launcher_is_gone(tfdist, launched):
    # The guard ends what a killed launcher leaves behind. Here it is gone as well.
    guard = next(each for each in psutil.Process(launched.pid).children() if "guard" in " ".join(each.cmdline()))
    pids = [task["pid"] for task in told(tfdist)["tasks"]]
    guard.kill()
    launched.send_signal(signal.SIGKILL)
    launched.wait(SECONDS)
    assert told(tfdist)["state"] == "lost"
    assert "gone, without a word; 4 of its tasks are still there" in tfdist("status").out
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
    rest, _ = follower.communicate(timeout=SECONDS)
    assert follower.returncode == 0
    assert "hello from" in first
    assert rest.count("hello from") == 3


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
    assert result.err == (f"left out: {tmp_path / 'cut'} is not the directory of a run: its plan.json cannot be read\n")


def test_nothing_to_show(tfdist, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "there is no folder runs" in tfdist("list").err
    assert "runs/latest is not the directory of a run" in tfdist("status").err
    (tmp_path / "runs").mkdir()
    result = tfdist("list")
    assert (result.code, result.out, result.err) == (0, "", "there are no runs in runs\n")


@pytest.mark.slow
def test_tasks_that_it_does_not_have(tfdist, launched):
    result = tfdist("logs", "--task", "worker:7")
    assert result.code == 2
    assert "the run has no task worker:7" in result.err
    assert "names no task" in tfdist("logs", "-t", "boss").err
    assert "has no logs of attempt 5" in tfdist("logs", "--attempt", "5").err
