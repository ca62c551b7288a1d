"""`tfdist launch`, with commands that need no TensorFlow."""

import importlib.util
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from tests.support.codes import codes_in, raises
from tests.support.ports import GIVEN_PORT
from tfdist_cli.cli.job import load_job
from tfdist_cli.launch.supervisor.restarts import SAME_FAILURE
from tfdist_cli.spec.loading.problems import SpecError

ROOT = str(Path(__file__).parents[2])
MIRRORED = "strategy: multi_worker_mirrored\nroles: {worker: {replicas: 2}}\n"
SECOND = "case $TF_CONFIG in *'\"index\":1'*) %s;; *) %s;; esac"
"""What the second worker does, and the first."""


@pytest.fixture
def mirrored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "pair.yaml"
    path.write_text(MIRRORED)
    return path


@pytest.fixture
def start(tmp_path):
    """A launcher in a process of its own, which is ended with the test."""
    started = []

    def start(*arguments, **options):
        argv = [sys.executable, "-m", "tfdist_cli", "launch", *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
        environment = os.environ | {"PYTHONPATH": ROOT}
        started.append(subprocess.Popen(argv, cwd=tmp_path, env=environment, start_new_session=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


def when_said(process, text, times):
    """Reads until `times` tasks have said a line; returns what follows `text` in each."""
    said: list[str] = []
    while len(said) < times:
        line = process.stderr.readline()
        assert line, "the launcher ended"
        if text in line:
            said.append(line.partition(text)[2].strip())
    return said


def result_of(folder):
    (run,) = (path for path in (folder / "runs").iterdir() if not path.is_symlink())
    return json.loads((run / "result.json").read_text())


def test_a_program_in_every_task(tfdist, cluster_file):
    script = 'case $TF_CONFIG in *\'"type":"chief"\'*) echo trained;; *) sleep 1000;; esac'
    result = tfdist("launch", cluster_file, "--", "sh", "-c", script)
    assert result.code == 0
    assert "[chief:0] trained\n" in result.err
    run = (cluster_file.parent / "runs" / "latest").resolve()
    out = result.out.splitlines()
    assert [line.split()[:2] for line in out[:3]] == [["chief:0", "done"], ["worker:0-1", "done"], ["ps:0", "done"]]
    assert f"run         {run}" in out
    assert (run / "attempt_1" / "chief-0" / "stdout.log").read_text() == "trained\n"
    assert sorted(path.name for path in run.iterdir()) == [
        "attempt_1", "cluster.yaml", "events.jsonl", "launcher.lock", "plan.json", "result.json"
    ]  # fmt: skip
    plan = json.loads((run / "plan.json").read_text())
    assert [task["address"].partition(":")[0] for task in plan["tasks"]] == ["127.0.0.1"] * 4
    assert plan["tasks"][3]["address"] == f"127.0.0.1:{GIVEN_PORT}"
    assert json.loads((run / "result.json").read_text())["exit_code"] == 0


def test_a_failure_is_told_first_with_its_last_lines_and_its_log(tfdist, mirrored):
    result = tfdist("launch", mirrored, "--", "sh", "-c", SECOND % ("seq 1 12 >&2; exit 7", "sleep 1000"))
    assert result.code == 7
    told = result.err[result.err.index("error[") :].splitlines()
    assert told[0].startswith("error[task-failed]: worker:1 failed ")
    assert told[0].endswith(" s, exit code 7")
    assert told[1:11] == [f"  {number}" for number in range(3, 13)]
    log = (mirrored.parent / "runs" / "latest").resolve() / "attempt_1" / "worker-1" / "stderr.log"
    assert told[11:] == [f"log: {log}"]
    assert "worker:1  exit code 7" in result.out
    error = json.loads((log.parent / "error.json").read_text())
    assert (error["exit_code"], error["last_lines"][-1]) == (7, "12")


def test_an_error_that_a_task_reports_is_told_once_and_consequences_after_it(tfdist, mirrored, monkeypatch):
    code = """
        import json, os, signal, sys, time
        from tfdist_cli.protocol.records import emit
        def fail(kind, message, traceback):
            emit("error", type=kind, message=message, hint=None, traceback=traceback)
            sys.exit(1)
        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
            signal.signal(signal.SIGTERM, lambda *_: fail("Lost", "a peer", ""))
            open("ready", "w")
            time.sleep(1000)
        while not os.path.exists("ready"): pass
        print("noise", flush=True)
        fail("ValueError", "bad shape", "Traceback (most recent call last):\\n  my code\\nValueError: bad shape\\n")
    """
    monkeypatch.setenv("PYTHONPATH", ROOT)
    result = tfdist("launch", mirrored, "--", sys.executable, "-c", textwrap.dedent(code))
    told = result.err[result.err.index("error[") :].splitlines()
    assert told[0].endswith("s, exit code 1: ValueError: bad shape")
    assert told[1:4] == ["  Traceback (most recent call last):", "    my code", "  ValueError: bad shape"]
    assert told[4].startswith("log: ")
    assert told[5].startswith("then: worker:0 failed after ")
    assert told[5].endswith("s, exit code 1: Lost: a peer")
    assert result.code == 1


def test_json(tfdist, mirrored):
    result = tfdist("launch", mirrored, "--json", "--quiet", "--", "sh", "-c", "echo hi; exit 4")
    assert json.loads(result.out)["exit_code"] == 4
    assert json.loads(result.out)["run_dir"] == str((mirrored.parent / "runs" / "latest").resolve())
    assert "[worker:0] hi" not in result.err
    assert codes_in(result.err) == ["task-failed"]


def test_json_has_null_for_what_is_no_number(tfdist, mirrored, tmp_path):
    result = tfdist(
        "launch", mirrored, "--json", "--quiet", "--", "printf", '\\036{"kind":"result","metrics":{"loss":NaN}}\\n'
    )
    told = json.loads(result.out, parse_constant=pytest.fail)
    assert told["metrics"] == {"loss": None}
    assert result_of(tmp_path)["metrics"] == {"loss": None}


def test_an_earlier_run_goes_on_in_its_directory(tfdist, mirrored, tmp_path):
    for attempt in (1, 2):
        result = tfdist("launch", mirrored, "--run-dir", "mine", "--", "sh", "-c", "echo $TFDIST_TASK_DIR")
        assert f"[worker:1] {tmp_path}/mine/attempt_{attempt}/worker-1" in result.err
    attempts = [json.loads(line)["attempt"] for line in (tmp_path / "mine" / "events.jsonl").read_text().splitlines()]
    assert set(attempts) == {1, 2}
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("master", "conf"),
    [
        ("yarn", {"spark.yarn.queue": "a b", "spark.yarn.dist.archives": "hdfs:///env.tar.gz#env"}),
        (
            "k8s://https://10.0.0.1:6443",
            {"spark.kubernetes.container.image": "registry:5000/tf:1", "spark.executor.instances": 5},
        ),
        ("k8s://10.0.0.1:6443", {"spark.kubernetes.executor.podNamePrefix": "a$b"}),
    ],
)
def test_spark_gets_master_and_properties_as_they_are(tfdist, mirrored, monkeypatch, master, conf):
    monkeypatch.setenv("SPARK_HOME", "/spark")
    monkeypatch.setenv("JAVA_HOME", "/java")
    spark = {"master_url": master, "conf": conf, "python": "env/bin/python"}
    given = f"launcher: spark\nstrategy: multi_worker_mirrored\nroles: {{worker: {{}}}}\nspark: {json.dumps(spark)}\n"
    mirrored.write_text(given)
    result = tfdist("launch", mirrored, "--dry-run", "--", "true")
    assert result.code == 0, result.err
    (command,) = [shlex.split(line) for line in result.out.splitlines() if "spark-submit" in line]
    assert command[:3] == ["/spark/bin/spark-submit", "--master", master]
    options = dict(word.split("=", 1) for before, word in pairwise(command) if before == "--conf")
    expected = {name: str(value) for name, value in conf.items()} | {"spark.pyspark.python": "env/bin/python"}
    assert {name: options.get(name) for name in expected} == expected


def test_a_dry_run_prints_what_would_be_started_and_starts_nothing(tfdist, mirrored, tmp_path):
    result = tfdist("launch", mirrored, "--dry-run", "--run-dir", "mine", "--", "touch", "started; exit")
    assert result.code == 0
    assert f"pair: multi_worker_mirrored, in {tmp_path / 'mine'}" in result.out.replace("\n", "")
    commands = [shlex.split(line) for line in result.out.splitlines() if line.startswith("env ")]
    assert [command[-2:] for command in commands] == [["touch", "started; exit"]] * 2
    assert f"TFDIST_RUN_DIR={tmp_path / 'mine'}" in commands[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pair.yaml"]


@pytest.mark.parametrize("dry", [("--dry-run",), ()])
@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--track", "foo"), "unknown-tracker"),
        (("--run-dir", "pair.yaml"), "run-directory-unusable"),
        (("--run-dir", "pair.yaml/below"), "run-directory-unusable"),
        (("--run-dir", "/proc/x"), "run-directory-unusable"),
        (("--run-dir", ""), "empty-path"),
        (("--run-dir", "full"), "not-a-run-dir"),
    ],
)
def test_a_dry_run_refuses_what_a_launch_refuses(options, code, dry, tfdist, mirrored, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    result = tfdist("launch", mirrored, *options, *dry, "--", "true")
    assert (result.code, codes_in(result.err), result.out) == (2, [code], "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "pair.yaml"]


def test_a_dry_run_creates_no_run_directory(tfdist, mirrored, tmp_path):
    assert tfdist("launch", mirrored, "--run-dir", "new/one", "--dry-run", "--", "true").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["pair.yaml"]


def test_a_dry_run_as_json_is_the_plan_as_json(tfdist, mirrored):
    dry = tfdist("launch", mirrored, "--dry-run", "--json", "--", "true")
    assert json.loads(dry.out) == json.loads(tfdist("plan", mirrored, "--json", "--", "true").out)


@pytest.mark.parametrize("dry", [("--dry-run",), pytest.param((), marks=pytest.mark.tensorflow)])
def test_a_recipe_without_checkpoints_does_not_take_the_directory_of_one_that_has_some(tfdist, cluster_file, dry):
    step = cluster_file.parent / "run" / "checkpoints" / "step-000000000007"
    step.mkdir(parents=True)
    (cluster_file.parent / "run" / "plan.json").write_text("{}")
    launch = ("launch", cluster_file, "--recipe", "digits.yaml", "--run-dir", "run", *dry)
    (cluster_file.parent / "digits.py").write_text("def model(params): ...\ndef dataset(params, split, shard): ...\n")
    assert codes_in(tfdist(*launch).err) == ["run-has-checkpoints"]
    assert not (cluster_file.parent / "run" / "attempt_1").exists()
    if dry:
        assert tfdist(*launch, "--set", "checkpoint.every_seconds=60").code == 0
        step.rmdir()
        assert tfdist(*launch).code == 0


@pytest.mark.parametrize(("given", "said"), [("nan", "'nan' is not a number"), ("x", "'x'"), ("-1", "less than 0")])
def test_what_is_no_number_of_seconds(tfdist, mirrored, given, said):
    result = tfdist("launch", mirrored, "--stall-timeout", given, "--dry-run", "--", "true")
    assert result.code == 2
    assert said in " ".join(result.err.split())
    assert "--stall-timeout" in result.err


def test_a_dry_run_of_a_recipe(tfdist, cluster_file):
    result = tfdist("launch", cluster_file, "--recipe", "digits.yaml", "--dry-run")
    assert result.out.count("tfdist_cli role --task worker:") >= 2


def test_nothing_to_run(tfdist, mirrored):
    result = tfdist("launch", mirrored)
    assert result.code == 2
    assert codes_in(result.err) == ["nothing-to-run"]
    assert str(mirrored) in result.err
    assert "hint: " in result.err


def test_a_recipe_and_a_program(tfdist, cluster_file):
    result = tfdist("launch", cluster_file, "--recipe", "digits.yaml", "--", "true")
    assert (result.code, codes_in(result.err)) == (2, ["recipe-and-program"])


def test_a_program_that_is_not_there(tfdist, mirrored, tmp_path):
    result = tfdist("launch", mirrored, "--", "no-such-program")
    assert result.code == 2
    assert codes_in(result.err) == ["program-not-found"]
    assert "worker:0" in result.err
    assert "'no-such-program'" in result.err
    assert not (tmp_path / "runs").exists()


def test_a_program_that_may_not_be_executed(tfdist, mirrored, tmp_path):
    (tmp_path / "train.sh").write_text("#!/bin/sh\nexit 0\n")
    result = tfdist("launch", mirrored, "--", "./train.sh")
    assert result.code == 2
    assert codes_in(result.err) == ["program-not-executable"]
    assert "chmod +x" in result.err
    (tmp_path / "train.sh").chmod(0o700)
    assert codes_in(tfdist("launch", mirrored, "--", "train.sh").err) == ["program-not-found"]  # it is not on PATH
    assert tfdist("launch", mirrored, "--", "./train.sh").code == 0


def test_a_task_that_ends_of_the_signal_that_would_stop_the_run_has_failed(tfdist, mirrored, monkeypatch):
    result = tfdist("launch", mirrored, "--", "sh", "-c", "kill -TERM $$")
    assert result.code == 143
    monkeypatch.chdir(mirrored.parent)
    news = json.loads(tfdist("status", "--json").out)
    assert (news["state"], news["exit_code"]) == ("failed", 143)


def test_a_machine_without_tensorflow(tfdist, cluster_file, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorflow" else find_spec(name))
    result = tfdist("launch", cluster_file, "--recipe", "digits.yaml")
    assert result.code == 2
    assert "pip install 'tfdist-cli[cpu]', or 'tfdist-cli[cuda]'" in result.err
    assert not (cluster_file.parent / "runs").exists()


def test_another_machine(tfdist, mirrored, tmp_path):
    result = tfdist("launch", mirrored, "-s", "roles.worker={hosts: [192.0.2.1]}", "--", "true")
    assert result.code == 2
    assert codes_in(result.err) == ["not-this-machine"]
    assert "worker:0" in result.err
    assert "192.0.2.1" in result.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_lets_the_tasks_save_and_end(start, mirrored, tmp_path, signum, code):
    saver = """
        import os, signal, sys, time
        def save(*_):
            os.write(1, b"saved\\n")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        os.write(1, b"ready\\n")
        time.sleep(1000)
    """
    process = start(mirrored, "--", sys.executable, "-c", textwrap.dedent(saver))
    when_said(process, "ready", 2)
    process.send_signal(signum)
    out, err = process.communicate()
    assert process.returncode == code
    assert err.count("] saved\n") == 2
    assert codes_in(err) == ["stopped-by-signal"]
    assert signum.name in err
    assert "worker:0-1 " in out
    assert result_of(tmp_path)["exit_code"] == code


@pytest.mark.slow
@pytest.mark.parametrize("form", ["--json", "--start-timeout=60"], ids=["json", "text"])
def test_a_terminal_that_is_closed_ends_the_job_and_does_not_change_its_exit_code(form, start, mirrored, tmp_path):
    """As a window or an ssh session does; what is printed after that raises an error."""
    master, terminal = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    process = start(mirrored, form, "--", "sh", "-c", "echo ready; sleep 1000", **streams)
    os.close(terminal)
    said = b""
    while said.count(b"ready") < 2:
        said += os.read(master, 4096)
    os.close(master)
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 129
    assert result_of(tmp_path)["exit_code"] == 129


@pytest.mark.slow
def test_a_second_interrupt_kills_at_once(start, mirrored):
    process = start(mirrored, "--", "sh", "-c", "trap '' TERM; echo ready; while true; do sleep 1; done")
    when_said(process, "ready", 2)
    process.send_signal(signal.SIGINT)
    when_said(process, "[tfdist] SIGINT: ", 1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 130
    assert "worker:0-1  killed by the launcher" in out


@pytest.mark.slow
def test_no_process_outlives_a_launcher_that_is_killed(start, mirrored):
    process = start(mirrored, "--", "sh", "-c", "sh -c 'sleep 1000 & echo pid $$ $!; wait' & wait")
    said = " ".join(when_said(process, "] pid ", 2))
    tasks = [psutil.Process(int(pid)) for pid in said.split()]
    process.kill()
    _, alive = psutil.wait_procs(tasks, timeout=10)
    assert [task for task in alive if task.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_no_training(start, mirrored, tmp_path):
    reading, writing = os.pipe()
    process = start(mirrored, "--", "sh", "-c", "seq 1 5000; touch done-$$", stderr=writing)
    os.close(writing)
    os.read(reading, 10)
    os.close(reading)
    assert process.wait() == 0
    assert len(list(tmp_path.glob("done-*"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("form", ["--json", "--quiet"], ids=["json", "text"])
def test_a_reader_of_the_result_that_goes_away_does_not_change_the_exit_code(form, start, mirrored, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    process = start(mirrored, form, "--", "sh", "-c", "touch done-$$", stdout=writing)
    os.close(writing)
    _, err = process.communicate()
    assert (process.returncode, len(list(tmp_path.glob("done-*")))) == (0, 2)
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_closed_streams_do_no_harm(closed, mirrored, tmp_path):
    """As of a job of cron or a service: `tfdist launch >&-`."""
    script = f'exec {" ".join(f"{number}>&-" for number in closed)}; exec "$@"'
    argv = [sys.executable, "-m", "tfdist_cli", "launch", mirrored, "--", "sh", "-c", "echo said"]
    done = subprocess.run(
        ["sh", "-c", script, "sh", *argv],
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": ROOT},
        capture_output=True,
    )
    assert (done.returncode, result_of(tmp_path)["exit_code"]) == (0, 0)
    (log, _) = (tmp_path / "runs" / "latest").glob("attempt_1/*/stdout.log")
    assert log.read_text() == "said\n"
    assert (b"said" in done.stderr) == (2 not in closed)
    assert (b"worker:0-1" in done.stdout) == (1 not in closed)


def test_a_program_that_is_lost_is_started_again_with_all_others(tfdist, mirrored):
    script = "case $TFDIST_TASK_DIR in *attempt_1/worker-1) echo one >&2; exit 7;; *attempt_1*) sleep 1000;; esac"
    result = tfdist("launch", mirrored, "--max-restarts", 1, "--", "sh", "-c", script)
    assert result.code == 0
    assert re.search(r"^\[tfdist\] worker:1 .* exit code 7; .* all tasks .*1 of 1\)$", result.err, re.MULTILINE)
    assert re.search(r"^lost: worker:1 after \S+ s, exit code 7; ", result.err, re.MULTILINE)
    assert "worker:0-1  done, started 2 times" in result.out
    kept = result_of(mirrored.parent)
    assert (kept["exit_code"], kept["attempts"]) == (0, 2)
    assert [(loss["task"], loss["attempt"], loss["cause"]) for loss in kept["losses"]] == [
        ("worker:1", 1, "exit code 7")
    ]
    run = mirrored.parent / "runs" / "latest"
    assert json.loads((run / "attempt_1" / "worker-1" / "error.json").read_text())["last_lines"] == ["one"]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [(line["task"], line["attempt"]) for line in events if line["event"] == "started"] == [
        ("worker:0", 1), ("worker:1", 1), ("worker:0", 2), ("worker:1", 2)
    ]  # fmt: skip
    (loss,) = (line for line in events if line["event"] == "loss")
    assert (loss["task"], loss["cause"], loss["restarts"]) == ("worker:1", "exit code 7", "the job")


def test_a_worker_is_started_again_alone_and_goes_on_in_its_logs(tfdist, cluster_file):
    script = """case $TFDIST_TASK_DIR in
        *chief-0) while ! test -e done; do sleep 0.02; done;;
        *worker-1) echo life >&2; test -e died && { touch done; sleep 1000; }; touch died; exit 7;;
        *) sleep 1000;;
    esac"""
    result = tfdist("launch", cluster_file, "--max-restarts", 1, "--", "sh", "-c", script)
    assert result.code == 0
    assert re.search(r"worker:1 .* exit code 7; restarting it \(restart 1 of 1\)", result.err)
    folder = cluster_file.parent / "runs" / "latest" / "attempt_1" / "worker-1"
    assert (folder / "stderr.log").read_text() == "life\ntfdist: started again\nlife\n"
    assert json.loads((folder / "error_1.json").read_text())["exit_code"] == 7
    assert not (folder / "error.json").exists()


def test_why_a_program_is_not_started_again_is_told(tfdist, mirrored):
    result = tfdist("launch", mirrored, "--max-restarts", 5, "--", "sh", "-c", SECOND % ("exit 7", "sleep 1000"))
    assert result.code == 7
    assert codes_in(result.err) == ["task-failed"]
    assert f"note: {SAME_FAILURE}\n" in result.err
    assert result_of(mirrored.parent)["not_restarted_because"] == SAME_FAILURE


@pytest.mark.parametrize(("restart", "lives"), [("{policy: job, max: 2}", 3), ("{policy: never}", 1)])
def test_a_role_has_its_own_rule(restart, lives, tfdist, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cluster = tmp_path / "pair.yaml"
    cluster.write_text(f"strategy: single\nroles: {{chief: {{restart: {restart}}}}}\n")
    result = tfdist("launch", cluster, "--", "sh", "-c", "echo alive; kill -KILL $$")
    assert result.code == 137
    assert result.err.count("[chief:0] alive") == lives


@pytest.mark.slow
def test_a_task_that_gives_no_sign_of_life_is_killed_and_named(tfdist, mirrored):
    code = """
        import json, os, signal, time
        from tfdist_cli.protocol.records import emit
        emit("beat", computed=0.0)
        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            time.sleep(0.05)
            emit("beat", computed=0.0)
    """
    result = tfdist("launch", mirrored, "--stall-timeout", 1, "--", sys.executable, "-c", textwrap.dedent(code))
    assert result.code == 124
    assert re.search(r"^error\[task-stalled\]: worker:1 .* 1\.\d s", result.err, re.MULTILINE)


SECRETS = """
strategy: multi_worker_mirrored
roles:
  worker:
    replicas: 2
    restart: {policy: job, max: 1}
    secrets: {API_KEY: {env: SOURCE}, PASSWORD: {file: password}}
"""
TELLS_ITS_SECRETS = """
import json, os, sys, time
key, password = os.environ["API_KEY"], os.environ["PASSWORD"]
assert (key, password) == ("key-key-key-1", 'pass"word'), "not what was given"
print("the key is", key, flush=True)
for part in (password[:4], password[4:] + "\\n"):
    os.write(2, part.encode())
    time.sleep(0.05)
record = {"kind": "error", "type": "LoginError", "message": f"no login with {password}", "hint": "", "traceback": ""}
os.write(2, b"\\x1e" + json.dumps(record).encode() + b"\\n")
sys.exit(3)
"""


def test_secrets_reach_tasks_that_are_started_again_and_are_seen_nowhere(tfdist, tmp_path, monkeypatch, mirrored):
    mirrored.write_text(SECRETS)
    (tmp_path / "password").write_text('pass"word\n')
    monkeypatch.setenv("SOURCE", "key-key-key-1")
    (tmp_path / "train.py").write_text(TELLS_ITS_SECRETS)
    program = ("--", sys.executable, tmp_path / "train.py")
    shown = []
    for launch in (1, 2):
        done = tfdist("launch", mirrored, "--run-dir", "run", *program)
        assert done.code == 3, done.err
        assert f"attempt_{2 * launch}/" in done.err, "it was started again"
        assert "the key is ***" in done.err
        assert "LoginError: no login with ***" in done.err
        shown += [done.out, done.err]
    for command in (["plan", mirrored, "--json"], ["status", "run", "--json"], ["logs", "run"]):
        done = tfdist(*command)
        assert done.code == 0, done.err
        shown += [done.out, done.err]
    shown += [tfdist("launch", mirrored, "--dry-run", *program).out]
    kept = [path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(kept) > 10
    for text in (*shown, *kept):
        assert not [value for value in ("key-key-key-1", 'pass"word', 'pass\\"word') if value in text]


def test_the_tasks_of_a_run_share_a_secret_that_is_seen_nowhere_else(tfdist, mirrored, tmp_path):
    """By it they know each other from strangers when they come together."""
    program = tmp_path / "tell.sh"
    program.write_text('printf %s "$TFDIST_RUN_SECRET" >"$TFDIST_TASK_DIR/given"; env; ps -o args -p $$ >&2\n')
    given = set()
    for launch in (1, 2):
        done = tfdist("launch", mirrored, "--run-dir", f"run{launch}", "--", "sh", program)
        assert done.code == 0, done.err
        assert "TFDIST_RUN_SECRET=***" in done.err
        files = [path for path in (tmp_path / f"run{launch}").rglob("*") if path.is_file()]
        told = {path.read_text() for path in files if path.name == "given"}
        assert len(told) == 1, "every task has the same one"
        (secret,) = told
        assert len(secret) > 32
        assert not [path for path in files if path.name != "given" and secret in path.read_text()]
        assert secret not in done.out + done.err
        given |= told
    assert len(given) == 2, "each launch makes its own"


def test_a_secret_that_is_not_there_is_told_before_anything_is_made(tfdist, mirrored, tmp_path, monkeypatch):
    mirrored.write_text(SECRETS)
    monkeypatch.delenv("SOURCE", raising=False)
    done = tfdist("launch", mirrored, "--run-dir", "run", "--", "true")
    assert done.code == 2
    assert codes_in(done.err) == ["secret-not-found"]
    assert "roles.worker.secrets.API_KEY: " in done.err
    assert not (tmp_path / "run").exists()


def test_a_module_that_is_not_there_is_told_before_anything_starts(tfdist, cluster_file, tmp_path):
    (tmp_path / "digits.yaml").write_text("module: digitz\n")
    result = tfdist("launch", cluster_file, "--recipe", "digits.yaml", "--run-dir", "run")
    assert result.code == 2
    assert codes_in(result.err) == ["no-such-module"]
    assert "did you mean 'digits'?" in result.err
    assert not (tmp_path / "run").exists()


def test_a_module_may_be_where_the_tasks_look_for_it(cluster_file, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "elsewhere.py").write_text("")
    (tmp_path / "digits.yaml").write_text("module: elsewhere\n")

    def check(*overrides):
        load_job(cluster_file, Path("digits.yaml"), overrides, None).check_module()

    with raises(SpecError, "no-such-module"):
        check()
    check(f"roles.worker.env.PYTHONPATH={tmp_path / 'lib'}")
    check("launcher=slurm")  # the nodes may have it
    (tmp_path / "elsewhere.py").write_text("")
    (tmp_path / "inner").mkdir()
    (tmp_path / "digits.yaml").write_text("module: elsewhere\nmodule_dir: inner\n")
    check()  # in the current folder, where `python -m` looks


def test_a_run_directory_of_another_recipe_is_warned_of(tfdist, cluster_file, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("module: another\n")
    result = tfdist("launch", cluster_file, "--recipe", "digits.yaml", "--run-dir", "run", "--dry-run")
    assert "warning[other-recipe]: run " in result.err
    assert "'another'" in result.err
    assert "'digits'" in result.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("launch", "gs://bucket/cluster.yaml"),
        (
            "plan",
            "cluster.yaml",
            "-r",
            "digits.yaml",
            "-s",
            "module_dir=gs://bucket/cluster.yaml",
        ),
        ("doctor", "gs://bucket/cluster.yaml"),
    ],
    ids=" ".join,
)
def test_a_bucket_is_no_path(arguments, tfdist, cluster_file, tmp_path):
    before = sorted(tmp_path.iterdir())
    result = tfdist(*arguments)
    assert result.code == 2
    assert codes_in(result.err) == ["unsupported-scheme"]
    assert "'gs://bucket/cluster.yaml'" in result.err
    assert sorted(tmp_path.iterdir()) == before


def test_data_may_be_in_a_bucket(tfdist, cluster_file, tmp_path):
    (tmp_path / "digits.yaml").write_text("module: digits\nparams: {data: gs://bucket/x}\n")
    result = tfdist("plan", cluster_file, "-r", "digits.yaml")
    assert (result.code, result.err) == (0, "")
