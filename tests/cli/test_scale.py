"""`tfdist scale`: what it takes, what it says, and who refuses it."""

import json
import subprocess
import sys
import textwrap
from datetime import datetime, timezone

import pytest

from tests.support.codes import codes_in
from tfdist_cli.launch.local.launcher import LocalLauncher
from tfdist_cli.launch.run.directory import open_run_dir
from tfdist_cli.launch.run.planner import Planner, RequestHandler
from tfdist_cli.launch.run.session import Launch
from tfdist_cli.launch.run.snapshot import RunSnapshot
from tfdist_cli.launch.supervisor.state import JobPolicy, Timeouts
from tfdist_cli.spec.roles import ROLES
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["runs/x"], "no-replicas", ""),
        (["wroker=3"], "unknown-role", "did you mean 'worker'?"),
        (["x=3"], "unknown-role", ", ".join(ROLES)),
        (["runs/x", "boss"], "unknown-role", "boss"),
        (["runs/x", "worker"], "wrong-type", "expected worker=N"),
        (["worker=many"], "wrong-type", "got 'many'"),
        (["worker=-1"], "wrong-type", "got '-1'"),
        (["worker=1", "worker=2"], "role-given-twice", "worker=2: "),
        (["worker=1"], "not-a-run-dir", "there is no run in "),
    ],
)
def test_what_cannot_be_meant(arguments, code, said, tfdist, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = tfdist("scale", *arguments)
    assert (result.code, codes_in(result.err)) == (2, [code])
    assert said in result.err


def test_a_run_that_has_ended_is_to_be_launched_again(tfdist, tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({"tasks": []}))
    (tmp_path / "launcher.lock").touch()
    result = tfdist("scale", tmp_path, "worker=4", "ps=2")
    assert result.code == 2
    assert codes_in(result.err) == ["run-not-running"]
    assert f"--run-dir {tmp_path} --set roles.worker.replicas=4 --set roles.ps.replicas=2" in result.err
    (tmp_path / "checkpoints" / "step-000000000007").mkdir(parents=True)
    assert tfdist("scale", tmp_path, "worker=4", "ps=2").err != result.err, "it continues from there"


ENDED = """
strategy: parameter_server
roles:
  chief: {}
  ps: {hosts: ['127.0.0.1:2000']}
  worker: {replicas: 2, max: 3, hosts: ['127.0.0.1:2001', '127.0.0.1:2002', '127.0.0.1:2003']}
"""


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        (["worker=0"], ""),
        (["worker=4"], ""),
        (["worker=3", "ps=2"], "--set roles.worker.replicas=3 --set roles.ps.replicas=2 -- COMMAND"),
    ],
)
def test_a_launch_is_advised_only_with_numbers_that_it_can_have(numbers, said, tfdist, tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({"tasks": []}))
    (tmp_path / "cluster.yaml").write_text(ENDED)
    result = tfdist("scale", tmp_path, *numbers)
    assert (result.code, codes_in(result.err)) == (2, ["run-not-running"])
    assert ("tfdist launch" in result.err) == bool(said)
    assert said in result.err


def test_a_run_of_one_process_that_has_ended(tfdist, tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({"tasks": []}))
    (tmp_path / "cluster.yaml").write_text("strategy: single\nroles: {chief: {}}\n")
    result = tfdist("scale", tmp_path, "worker=2")
    assert (result.code, codes_in(result.err)) == (2, ["run-not-running"])


PROGRAM = """
import json, os, pathlib, time
def emit(kind, **fields):
    os.write(2, b"\\x1e" + json.dumps({"kind": kind, **fields}).encode() + b"\\n")
task = json.loads(os.environ["TF_CONFIG"])["task"]
emit("state", state="training")
run = pathlib.Path(os.environ["TFDIST_RUN_DIR"])
if "attempt_1" in os.environ["TFDIST_TASK_DIR"]:
    if not task["index"]:
        emit("progress", step=7)
        (run / "trains").touch()
    time.sleep(1000)
if not task["index"]:
    emit("resumed", step=7)
    emit("progress", step=8)
while "from step 7" not in (run / "said").read_text():
    time.sleep(0.02)
"""

ANOTHER = """
import pathlib, subprocess, sys, time
run = pathlib.Path(sys.argv[1])
while not (run / "trains").exists():
    time.sleep(0.02)
scale = [sys.executable, "-m", "tfdist_cli", "scale", str(run)]
with open(run / "said", "w") as said:
    for options in (["worker=0"], ["worker=2"], ["worker=3", "--dry-run"], ["worker=3", "--timeout", "60"]):
        code = subprocess.run(scale + options, stdout=said, stderr=said).returncode
        print(options, code, file=said, flush=True)
"""


@pytest.mark.slow
def test_a_run_is_scaled_from_another_process(tmp_path):
    """Somebody at another terminal asks for a third worker."""
    roles = {"worker": {"replicas": 2}}
    cluster = Cluster.model_validate({"strategy": "multi_worker_mirrored", "roles": roles})
    recipe = Recipe.model_validate({"module": "x", "module_dir": "/", "checkpoint": {"every_steps": 5}})
    program = (sys.executable, "-c", textwrap.dedent(PROGRAM))
    rules = JobPolicy(cluster.strategy, reports=True, timeouts=Timeouts(shutdown=10))
    now = datetime(2026, 1, 1, tzinfo=timezone.utc)
    with (
        Planner(LocalLauncher(), cluster, recipe, program).reserving() as planner,
        open_run_dir(tmp_path / "run", tmp_path, "x", now) as run_dir,
        subprocess.Popen([sys.executable, "-c", ANOTHER, run_dir.path]) as another,
    ):
        report = Launch(
            LocalLauncher(), planner.plan(run_dir), run_dir, rules, request_handler=RequestHandler(planner, run_dir)
        ).run(RunSnapshot())
    assert another.returncode == 0
    said = (tmp_path / "run" / "said").read_text().splitlines()
    assert said[0].startswith("error[scale-rejected]: cluster: roles.worker: ")
    assert said[1:6] == [
        "['worker=0'] 2",
        "nothing to do: the run already has worker 2",
        "['worker=2'] 0",
        "worker 2 → 3: possible, through a checkpoint; nothing was changed",
        "['worker=3', '--dry-run'] 0",
    ]
    assert said[6].startswith("worker 2 → 3: ")
    assert said[7].startswith("worker 2 → 3: ")
    assert " from step 7 " in said[7]
    assert len(report.tasks) == 3
    (resize,) = report.as_json()["resizes"]
    assert (resize["replicas"], resize["step"], resize["resumed"]) == ({"worker": [2, 3]}, 7, 7)
    assert sorted(path.name for path in (tmp_path / "run" / "attempt_2").iterdir()) == [
        "worker-0", "worker-1", "worker-2"
    ]  # fmt: skip


@pytest.mark.slow
def test_a_program_of_its_own_is_refused_and_goes_on(tfdist, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.yaml").write_text("strategy: multi_worker_mirrored\nroles: {worker: {replicas: 2}}\n")
    argv = [sys.executable, "-m", "tfdist_cli", "launch", "cluster.yaml", "--", "sh", "-c", "echo hello; sleep 600"]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as launched:
        try:
            assert any(b"hello" in line for line in launched.stderr)
            result = tfdist("scale", "worker=3")
            assert result.code == 2
            assert codes_in(result.err) == ["scale-rejected"]
            assert launched.poll() is None
            assert any(b"rejected a request to scale: " in line for line in launched.stderr)
            status = json.loads(tfdist("status", "--json").out)
            assert (status["state"], status["scaled"]) == ("running", [])
        finally:
            launched.terminate()
            launched.communicate(timeout=30)
    assert launched.returncode == 143


ELASTIC = """
import json, os, pathlib, signal, sys, time
def emit(kind, **fields):
    os.write(2, b"\\x1e" + json.dumps({"kind": kind, **fields}).encode() + b"\\n")
task = json.loads(os.environ["TF_CONFIG"])["task"]
run = pathlib.Path(os.environ["TFDIST_RUN_DIR"])
def leave(*_):
    if not (run / "done").exists():
        emit("state", state="left")
        os._exit(0)
    os._exit(143)
if task["type"] != "chief":
    signal.signal(signal.SIGTERM, leave if task["index"] < 2 else signal.SIG_IGN)
    emit("state", state="serving")
    (run / f"here-{task['type']}-{task['index']}").touch()
    time.sleep(1000)
emit("state", state="training")
emit("elastic", joins=True)
known, step = {"here-worker-0", "here-ps-0"}, 0
(run / "trains").touch()
while not (run / "said").exists() or "['worker=1'] 1" not in (run / "said").read_text():
    step += 1
    emit("progress", step=step)
    for path in run.glob("here-*"):
        if path.name not in known:
            known.add(path.name)
            emit("joined", worker=path.name[5:].replace("-", ":"), step=step, took=0.1)
    time.sleep(0.05)
(run / "done").touch()
emit("state", state="done")
"""


@pytest.mark.slow
def test_workers_join_and_leave_a_running_job(tmp_path):
    roles = {"chief": {}, "worker": {"replicas": 1, "max": 3}, "ps": {}}
    cluster = Cluster.model_validate({"strategy": "parameter_server", "roles": roles})
    recipe = Recipe.model_validate({"module": "x", "module_dir": "/"})  # without checkpoints
    program = (sys.executable, "-c", textwrap.dedent(ELASTIC))
    rules = JobPolicy(cluster.strategy, reports=True, timeouts=Timeouts(shutdown=1))
    now = datetime(2026, 1, 1, tzinfo=timezone.utc)
    asked = '(["worker=3", "--dry-run"], ["worker=3"], ["worker=4"], ["ps=2"], ["worker=1"])'
    another = ANOTHER.partition("for options in")[0] + f"for options in {asked}:" + ANOTHER.partition('"60"]):')[2]
    with (
        Planner(LocalLauncher(), cluster, recipe, program).reserving() as planner,
        open_run_dir(tmp_path / "run", tmp_path, "x", now) as run_dir,
        subprocess.Popen([sys.executable, "-c", another, run_dir.path]) as other,
    ):
        report = Launch(
            LocalLauncher(), planner.plan(run_dir), run_dir, rules, request_handler=RequestHandler(planner, run_dir)
        ).run(RunSnapshot())
    assert other.returncode == 0
    said = (tmp_path / "run" / "said").read_text()
    lines = [line for line in said.splitlines() if not line.startswith("hint")]
    assert lines[0].startswith("worker 1 → 3: possible")
    assert lines[2].endswith("the others continue")
    assert lines[3].startswith("worker 1 → 3: worker:1, worker:2 joined after ")
    # Above max, without a checkpoint, and the one that ignores SIGTERM.
    assert codes_in(said) == ["scale-rejected", "scale-rejected", "lost-while-scaling"]
    assert [line for line in lines if line.startswith("[")] == [
        "['worker=3', '--dry-run'] 0", "['worker=3'] 0", "['worker=4'] 2", "['ps=2'] 2", "['worker=1'] 1"
    ]  # fmt: skip
    assert (report.exit_code, report.attempts, report.lost_tasks) == (0, 1, ())
    statuses = {str(task.task): task.status.value for task in report.tasks}
    assert (statuses["worker:1"], statuses["worker:2"]) == ("left", "stopped")
    assert {statuses[name] for name in ("worker:0", "ps:0", "chief:0")} == {"done"}
    first, second = report.as_json()["resizes"]
    assert (first["joined"], first["left"]) == (["worker:1", "worker:2"], [])
    assert (second["joined"], second["left"], second["lost"]) == ([], ["worker:1"], ["worker:2"])
    assert {path.name for path in (tmp_path / "run").glob("attempt_*")} == {"attempt_1"}
