"""`tfdist.launch` and `tfdist.Run`: runs from Python."""

import asyncio
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

import tfdist_cli as tfdist
from tests.support.codes import raises
from tests.support.recorded import trained_run
from tfdist_cli.errors import RunFailed, TimeoutExceeded, UsageError
from tfdist_cli.runs import handle
from tfdist_cli.runs.handle import _as_yaml, launcher_error
from tfdist_cli.spec.loading.overrides import Override
from tfdist_cli.spec.loading.problems import SpecError

CLUSTER = "strategy: parameter_server\nnetwork: host\nroles: {chief: {}, worker: {replicas: 2}, ps: {}}\n"
ENDS = "import os; print('hello', os.environ['TFDIST_RUN_DIR'])"
GOES_ON = "import time; print('hello', flush=True); time.sleep(600)"
SECONDS = 60


def program(code):
    return [sys.executable, "-c", code]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return path


@pytest.mark.slow
def test_a_run_to_its_end(cluster):
    run = tfdist.launch(cluster, command=program(ENDS), set={"name": "trial", "roles.worker.replicas": 1})
    view = run.wait(SECONDS)
    assert (view.outcome.value, view.result["exit_code"], view.name) == ("done", 0, "trial")
    assert [str(task.task) for task in view.tasks] == ["chief:0", "worker:0", "ps:0"]
    assert run.logs("chief") == f"hello {run.path}\n"
    assert run.logs("worker:0", stream="stderr") == ""
    assert (run.path.parent / "latest").resolve() == run.path
    assert run.stop().outcome.value == "done"
    with raises(UsageError, "unknown-task"):
        run.logs("worker:1")
    with raises(UsageError, "invalid-task"):
        run.logs("boss")
    again = tfdist.launch(cluster, command=program(ENDS), run_dir=run.path)
    assert again.wait(SECONDS).began != view.began
    assert again.path == run.path


@pytest.mark.slow
def test_a_run_that_is_stopped_while_another_handle_waits(cluster):
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with tfdist.launch(str(cluster), command=program(GOES_ON)) as run:
        assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
        launcher = run.status().launcher
        with raises(TimeoutExceeded, "run-not-ended"):
            run.wait(0.01)
        failures = []

        def wait():
            with raises(RunFailed, "stopped-by-signal"):
                tfdist.Run(run.path).wait(SECONDS)
            failures.append(True)

        waiting = threading.Thread(target=wait)
        waiting.start()
    waiting.join(SECONDS)
    assert failures
    assert run.status().outcome.value == "stopped"
    assert not psutil.pid_exists(launcher)


@pytest.mark.slow
def test_in_a_thread_and_in_a_running_event_loop(cluster):
    async def notebook():
        run = await asyncio.to_thread(tfdist.launch, cluster, command=program(ENDS))
        inline = tfdist.launch(cluster, command=program(ENDS))
        return run.wait(SECONDS).outcome.value, inline.wait(SECONDS).outcome.value

    assert asyncio.run(notebook()) == ("done", "done")


@pytest.mark.slow
def test_a_task_that_fails_gives_its_code(cluster):
    run = tfdist.launch(cluster, command=program("raise SystemExit(3)"), max_restarts=0)
    with raises(RunFailed, "task-failed"):
        run.wait(SECONDS)
    assert run.status().result["exit_code"] == 3


@pytest.mark.slow
def test_what_the_launcher_refuses_has_its_code_and_leaves_nothing(cluster):
    with raises(RunFailed, "nothing-to-run"):
        tfdist.launch(cluster)
    assert not list(Path("runs").iterdir())


def test_a_wrong_file_is_refused_at_once(cluster):
    with pytest.raises(SpecError):
        tfdist.launch(cluster, set={"roles.worker.replicas": "many"})
    assert not Path("runs").exists()


@pytest.mark.slow
def test_neither_tensorflow_nor_the_launcher_is_imported(cluster):
    code = f"""
import sys, tfdist_cli as tfdist
assert callable(tfdist.launch) and tfdist.Run
tfdist.launch("cluster.yaml", command={program(ENDS)!r}).wait({SECONDS})
assert not {{"tensorflow", "keras", "numpy", "typer", "rich"}} & set(sys.modules)
"""
    subprocess.run(program(code), check=True, env={"PYTHONPATH": str(Path(tfdist.__file__).parents[1])}, timeout=100)


def test_metrics_are_rows_of_a_table(tmp_path):
    run = tfdist.Run(trained_run(tmp_path / "run").path)
    rows = run.metrics("train")
    assert [row["step"] for row in rows] == [20, 40, 60]
    assert (rows[0]["loss"], rows[0]["steps_per_second"], rows[0]["split"]) == (0.5, 21.0, "train")
    assert len(run.metrics()) == 6
    assert run.metrics("test")[0]["steps_per_second"] is None


@pytest.mark.parametrize(
    "value", [1, 0.5, 1e-05, 1e300, True, None, "async", "1e-3", "a: b", [1, {"a": "#"}], {"x": 2.0}]
)
def test_values_are_those_of_the_command_line(value):
    node = Override.parse(f"a.b={_as_yaml(value)}", {}).value

    def plain(node):
        content = node.content
        if isinstance(content, dict):
            return {key: plain(item) for key, item in content.items()}
        return [plain(item) for item in content] if isinstance(content, list) else content

    assert plain(node) == value
    assert type(plain(node)) is type(value)


def test_the_error_of_a_launcher():
    error = launcher_error("warning[x]: y\nerror[bad-key]: one\nerror[bad-key]: two\nhint: do\nhint: not\n")
    assert error is not None
    assert (error.code, error.message, error.hint) == ("bad-key", "one\ntwo", "do")
    assert launcher_error("Killed\n") is None


def test_a_launch_is_tracked(cluster, monkeypatch):
    started = []
    monkeypatch.setattr(handle, "start_launcher", lambda argv, path: started.append(argv))
    monkeypatch.setattr(handle, "Run", lambda path, launcher: path)
    tfdist.launch(cluster, command=["true"], track=["csv", "tensorboard"])
    (argv,) = started
    before = argv[: argv.index("--")]
    assert [value for option, value in pairwise(before) if option == "--track"] == ["csv", "tensorboard"]
