"""Trainings on a real Slurm cluster of four nodes, on this machine."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.codes import codes_in
from tests.support.lab.slurm import slurm  # noqa: F401 - a fixture
from tests.support.launching import MIRRORED, PARAMETER_SERVER, RECIPE_YAML, finish, project, start
from tfdist_cli.launch.slurm.script import _option

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]

ROOT = Path(__file__).parents[2]
LONG = RECIPE_YAML.replace("epochs: 4", "epochs: 100000").replace("every_steps: 40", "every_steps: 1000000")
PATIENCE = 240
"""A generous timeout: on an idle machine each wait takes a few seconds."""


@pytest.fixture
def lab(slurm, monkeypatch):  # noqa: F811 - the fixture above
    """The cluster, with its users' environment."""
    for name, value in slurm.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield slurm
    subprocess.run(["scancel", "--state=RUNNING", "--state=PENDING", "--user=root"], check=False, timeout=30)


def launched(folder, *arguments):
    return start(folder, "--on", "slurm", "--start-timeout", PATIENCE, *arguments)


def await_lines(process, path, predicate):
    """Waits until a line of a JSON Lines file satisfies a predicate, by polling: nothing announces it."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        if any(predicate(line) for line in lines):
            return lines
        time.sleep(0.2)
    raise AssertionError(f"no such line in {path}: {lines[-5:]}")


def output_of_profile(run):
    argv = [sys.executable, "-m", "tfdist_cli", "profile", run, "--task", "worker:1", "--json"]
    return subprocess.run(argv, stdout=subprocess.PIPE, check=True, timeout=60).stdout


def job_of(run):
    return (run / "slurm_job").read_text().strip()


def job_fields(lab, job, *fields):
    """The values of some fields of a job in Slurm's records."""
    words = lab.run("scontrol", "--oneliner", "show", "job", job).split()
    known = dict(word.split("=", 1) for word in words if "=" in word)
    return [known[field] for field in fields]


def await_end(lab, job):
    """Waits until a job is over, and returns its state."""
    deadline = time.monotonic() + 30
    while (state := job_fields(lab, job, "JobState")[0]) in ("RUNNING", "COMPLETING") and time.monotonic() < deadline:
        time.sleep(0.2)
    return state


@pytest.mark.rotates(5)
@pytest.mark.parametrize(
    "cluster", ["slurm.yaml", "local_multi_worker_mirrored.yaml"], ids=["parameter_server", "mirrored"]
)
def test_the_digits_are_learned(cluster, lab, tmp_path):
    text = (ROOT / "configs" / cluster).read_text().replace("../recipes", str(ROOT / "recipes"))
    (tmp_path / "cluster.yaml").write_text(text)
    done = finish(launched(tmp_path, "--set", "train.epochs=8"), PATIENCE)
    assert done.code == 0, done.stderr
    assert done.report["metrics"]["test_accuracy"] > 0.9
    assert {task["status"] for task in done.report["tasks"]} <= {"done", "stopped"}
    assert {task["code"] for task in done.report["tasks"]} == {0}
    assert await_end(lab, job_of(done.run_dir)) == "COMPLETED"
    assert "Traceback" not in done.stderr
    assert not list(done.run_dir.rglob("*.raw"))


@pytest.mark.rotates(5, 1)
def test_ctrl_c_saves_a_checkpoint_in_a_heterogeneous_job_after_a_profile(lab, tmp_path):
    yaml = PARAMETER_SERVER.replace("worker: {replicas: 2}", "worker: {replicas: 2, cpus: 3}") % ""
    folder = project(tmp_path, cluster=yaml, recipe_yaml=LONG)
    process = launched(folder, "--run-dir", "run")
    await_lines(process, folder / "run" / "metrics.jsonl", lambda line: line["step"] > 300)
    profiled = json.loads(output_of_profile(folder / "run"))
    process.send_signal(signal.SIGINT)
    done = finish(process, PATIENCE)
    assert done.code == 130, done.stderr
    assert Path(profiled["path"]).stat().st_size == profiled["bytes"]
    assert any("MatMul" in each["name"] for each in profiled["operations"])
    (saved,) = done.report["checkpoints"]
    assert saved["step"] > 30
    assert Path(saved["path"]).is_dir()
    assert await_end(lab, job_of(done.run_dir)) == "FAILED"
    assert job_fields(lab, job_of(done.run_dir), "ExitCode", "Restarts") == ["143:0", "0"]


@pytest.mark.rotates(5, 4)
def test_a_job_cancelled_outside_saves_and_is_not_submitted_again(lab, tmp_path):
    folder = project(tmp_path, cluster=MIRRORED, recipe_yaml=LONG)
    process = launched(folder, "--run-dir", "run")
    await_lines(process, folder / "run" / "metrics.jsonl", lambda line: line["step"] > 30)
    job = job_of(folder / "run")
    lab.run("scancel", job)
    done = finish(process, PATIENCE)
    assert done.code == 143, done.stderr
    assert f"job {job} was cancelled" in done.report["headline"]
    assert (done.report["attempts"], done.report["losses"]) == (1, [])
    assert [saved["step"] > 30 for saved in done.report["checkpoints"]] == [True]
    assert job_of(done.run_dir) == job
    assert job_fields(lab, job, "JobState") == ["CANCELLED"]


@pytest.mark.rotates(5, 1)
def test_the_training_continues_from_its_checkpoint_after_a_node_failure(lab, tmp_path):
    yaml = LONG.replace("every_steps: 1000000", "every_steps: 50")
    folder = project(tmp_path, recipe_yaml=yaml)
    process = launched(folder, "--run-dir", "run", "--set", "train.max_steps=1500")
    await_lines(process, folder / "run" / "events.jsonl", lambda line: line["event"] == "checkpoint")
    (node,) = job_fields(lab, job_of(folder / "run"), "BatchHost")
    lab.kill_node(node)
    events = await_lines(process, folder / "run" / "events.jsonl", lambda line: line["event"] == "resumed")
    lab.start_node(node)
    resumed = next(line for line in events if line["event"] == "resumed")
    assert resumed["step"] >= 50
    assert resumed["attempt"] == 2
    done = finish(process, PATIENCE)
    assert done.code == 0, done.stderr
    assert done.report["attempts"] == 2


def test_sbatch_keeps_every_value_literal(lab, tmp_path):
    names = ["a'; echo foo", 'say "hi" \\ there', "Grüße # 1", "x" * 100, "$HOME `id` %j", "a\\", "'", "--wrap=x"]
    for name in names:
        (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{_option('job-name', name)}\n#SBATCH --comment=after\n")
        job = lab.run("sbatch", "--parsable", "--hold", str(tmp_path / "job.sh")).strip()
        assert lab.run("squeue", "--noheader", f"--jobs={job}", "--format=%j|%k").rstrip("\n") == f"{name}|after"


PROGRAM = """
import json, os, signal, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
print("hello from", task["type"], task["index"], "on", os.environ["SLURMD_NODENAME"], flush=True)
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, lambda *_: print("not yet", flush=True))
while sys.argv[1] != "end" or task["type"] != "chief" or not os.path.exists("all-are-up"):
    time.sleep(0.1)
"""
COMPONENTS = (
    "strategy: parameter_server\nlauncher: slurm\nroles: {chief: {}, ps: {cpus: 2}, worker: {replicas: 2, cpus: 3}}\n"
)


def run_program(folder, mode, *options):
    """Runs a user's program in every task of a heterogeneous job of three components, until all have said hello."""
    (folder / "cluster.yaml").write_text(COMPONENTS)
    (folder / "program.py").write_text(PROGRAM)
    process = start(folder, "--run-dir", "run", *options, "--", sys.executable, "program.py", mode)
    tasks = ("chief-0", "ps-0", "worker-0", "worker-1")
    logs = [folder / "run" / "attempt_1" / task / "stdout.log" for task in tasks]
    deadline = time.monotonic() + PATIENCE
    while not all(log.exists() and "hello" in log.read_text() for log in logs):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    (folder / "all-are-up").touch()
    return process, {log.read_text().split()[-1] for log in logs}


def test_a_program_exits_with_its_chief_on_all_nodes(lab, tmp_path):
    process, nodes = run_program(tmp_path, "end")
    done = finish(process, PATIENCE)
    assert done.code == 0, done.stderr
    assert len(nodes) > 1
    assert await_end(lab, job_of(tmp_path / "run")) == "COMPLETED"


@pytest.mark.rotates(5, 1)
def test_a_second_ctrl_c_kills_the_tasks_of_every_component(lab, tmp_path):
    process, _ = run_program(tmp_path, "stubborn")
    process.send_signal(signal.SIGINT)
    log = tmp_path / "run" / "attempt_1" / "chief-0" / "stdout.log"
    deadline = time.monotonic() + PATIENCE
    while "not yet" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    done = finish(process, PATIENCE)
    assert done.code == 130, done.stderr
    assert time.monotonic() - began < 15
    assert done.report["warnings"] == []  # such as of tasks that SIGKILL has not ended
    assert await_end(lab, job_of(tmp_path / "run")) in ("FAILED", "CANCELLED")


@pytest.mark.rotates(5, 4)
def test_the_job_of_a_killed_launcher_blocks_its_directory_until_stop_ends_it(lab, tmp_path, monkeypatch):
    process, _ = run_program(tmp_path, "wait")
    process.kill()
    process.communicate()
    job = job_of(tmp_path / "run")
    assert job_fields(lab, job, "JobState") == ["RUNNING"]
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    again = finish(start(tmp_path, "--run-dir", "run", "--", "true"))
    assert again.code == 2
    assert codes_in(again.stderr) == ["job-still-active"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before
    monkeypatch.chdir(tmp_path)
    argv = [sys.executable, "-m", "tfdist_cli", "stop", "run"]
    stopped = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert (stopped.returncode, stopped.stdout) == (0, "run has ended\n"), stopped.stderr
    assert job_fields(lab, job, "JobState") == ["CANCELLED"]


TASK = """#!/bin/sh
trap 'echo told "$SLURM_PROCID"; exit 143' TERM
echo began "$SLURM_PROCID" "${SLURM_RESTART_COUNT:-0}"
[ -z "${SLURM_RESTART_COUNT-}" ] || exit 0
while :; do sleep 0.1; done
"""


@pytest.mark.rotates(5, 0)
def test_a_job_saves_before_its_time_limit_and_is_requeued(lab, tmp_path):
    """The script alone, with tasks that save and exit as a training does; Slurm checks time limits every 30 s."""
    folder = project(tmp_path, cluster=MIRRORED)
    (tmp_path / "python").write_text(TASK)
    (tmp_path / "python").chmod(0o755)
    settings = [f"--set=slurm.{key}" for key in (f"python={tmp_path}/python", "time=1")]
    render = [sys.executable, "-m", "tfdist_cli", "render", "cluster.yaml", "--to", "slurm", *settings]
    (folder / "job.sh").write_text(
        subprocess.run(render, cwd=folder, capture_output=True, text=True, check=True).stdout
    )
    job = lab.run("sbatch", "--parsable", f"--chdir={folder}", str(folder / "job.sh")).strip()
    out = folder / f"slurm-{job}.out"
    deadline = time.monotonic() + PATIENCE
    while job_fields(lab, job, "JobState") != ["COMPLETED"]:
        assert time.monotonic() < deadline, out.read_text()
        time.sleep(0.5)
    assert job_fields(lab, job, "Restarts", "ExitCode") == ["1", "0:0"]
    lines = [line for line in out.read_text().splitlines() if "began" in line or "told" in line]
    assert sorted(lines[:2]) == ["0: began 0 0", "1: began 1 0"]
    assert sorted(lines[2:4]) == ["0: told 0", "1: told 1"]
    assert sorted(lines[4:]) == ["0: began 0 1", "1: began 1 1"]


ELASTIC = "strategy: parameter_server\nroles: {chief: {}, ps: {}, worker: {replicas: 2, max: 4}}\nrecipe: recipe.yaml\n"


def scale(folder, *arguments):
    argv = [sys.executable, "-m", "tfdist_cli", "scale", folder / "run", *arguments]
    asked = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert asked.returncode == 0, asked.stderr
    return asked.stdout


@pytest.mark.rotates(5, 0)
def test_workers_join_and_leave_a_job_that_runs(lab, tmp_path):
    """Each one that joins has a job of its own; each one leaves alone, also one of the first job."""
    folder = project(tmp_path, cluster=ELASTIC, recipe_yaml=LONG)
    process = launched(folder, "--run-dir", "run", "--max-restarts", "0")
    metrics, events = folder / "run" / "metrics.jsonl", folder / "run" / "events.jsonl"
    await_lines(process, metrics, lambda line: "worker:1" in line.get("worker_steps", {}))
    assert "worker:2 joined after" in scale(folder, "worker=3")
    first, added = (folder / "run" / "slurm_job").read_text().split()
    assert job_fields(lab, added, "JobState", "NumTasks") == ["RUNNING", "1"]
    lab.run("scancel", "--signal=TERM", added)  # as of a node that is taken away
    await_lines(process, events, lambda line: line["event"] == "exited" and line["task"] == "worker:2")
    assert await_end(lab, added) == "COMPLETED"
    assert "worker:1 left after" in scale(folder, "worker=1")
    assert "worker:1 joined after" in scale(folder, "worker=2")
    assert job_fields(lab, first, "JobState") == ["RUNNING"]
    process.send_signal(signal.SIGINT)
    done = finish(process, PATIENCE)
    assert done.code == 130, done.stderr
    assert (done.report["attempts"], done.report["losses"]) == (1, [])
    assert [resize["failed"] for resize in done.report["resizes"]] == [[], [], []]
    (saved,) = done.report["checkpoints"]
    trained = [line for line in done.lines("metrics.jsonl") if "worker_steps" in line][-1]
    assert sum(trained["worker_steps"].values()) == trained["step"] <= saved["step"]
    assert not list(done.run_dir.rglob("*.raw"))


def test_a_worker_that_is_started_by_hand_finds_the_addresses_of_a_job(lab, tmp_path):
    """Here it runs a program, which prints what it is given."""
    (tmp_path / "cluster.yaml").write_text(ELASTIC.replace("recipe: recipe.yaml", "launcher: slurm"))
    running = {"chief:0": "n1:10100", "worker:0": "n1:10101", "worker:1": "n2:10102", "ps:0": "n1:10103"}
    (tmp_path / "slurm_addresses.json").write_text(json.dumps(running))
    role = ["srun", "--ntasks=1", "--nodelist=n3", sys.executable, "-m", "tfdist_cli", "role", "--task", "worker:2"]
    role += ["--cluster", "cluster.yaml", "--run-dir", str(tmp_path), "--", "printenv", "TF_CONFIG"]
    found = subprocess.run(role, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=PATIENCE)
    addresses = json.loads(found.stdout)["cluster"]
    assert addresses["chief"] + addresses["ps"] == ["n1:10100", "n1:10103"]
    assert addresses["worker"][:2] == ["n1:10101", "n2:10102"]
    assert addresses["worker"][2].startswith("n3:")
