"""A launch: tasks that report, and what is kept of them."""

import json
import sys
import textwrap
from contextlib import asynccontextmanager
from datetime import datetime, timezone

import pytest

from tests.launch.run.test_event_loop import ScriptedLauncher, ScriptedRequests
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.local.launcher import LocalLauncher
from tfdist_cli.launch.run.directory import open_run_dir
from tfdist_cli.launch.run.history import Outcome, read_run
from tfdist_cli.launch.run.session import Launch
from tfdist_cli.launch.run.snapshot import RunSnapshot
from tfdist_cli.launch.supervisor.events import RecordReceived
from tfdist_cli.launch.supervisor.state import JobPolicy, Timeouts
from tfdist_cli.spec.task_id import TaskId

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


@pytest.fixture
def launch(tmp_path, make_cluster, plan_for):
    """Runs code in each of two workers, which report as those of a recipe do."""

    def launch(code, **timeouts):
        cluster = make_cluster(worker=2)
        rules = JobPolicy(cluster.strategy, reports=True, timeouts=Timeouts(**timeouts))
        with open_run_dir(tmp_path / "run", tmp_path, "x", NOW) as run_dir:
            plan = plan_for(cluster, sys.executable, "-c", textwrap.dedent(PROGRAM + code), run_dir=run_dir.path)
            run_dir.save(plan)
            return Launch(LocalLauncher(), plan, run_dir, rules).run(RunSnapshot())

    return launch


PROGRAM = """
        import json, os, sys, time
        def emit(kind, **fields):
            os.write(2, b"\\x1e" + json.dumps({"kind": kind, **fields}).encode() + b"\\n")
        assert os.environ["TFDIST_RECORDS"] == "1"
        assert int(os.environ["TFDIST_LAUNCHER_PID"]) == os.getppid()
        index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
"""


def test_tasks_that_do_not_come_up(launch, tmp_path):
    report = launch(
        """
        if index == 0:
            emit("state", state="waiting")
        else:
            emit("state", state="starting")
            print("downloading data", flush=True)
        time.sleep(1000)
        """,
        start=0.5,
    )
    assert report.exit_code == 124
    assert report.code == "start-timeout"
    assert report.headline.endswith("0.5 s: worker:1")
    (failure,) = report.failures
    assert failure.last_lines == ("downloading data",)
    assert failure.log == tmp_path / "run" / "attempt_1" / "worker-1" / "stdout.log"
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["exit_code"], result["attempt"], result["run_dir"]) == (124, 1, str(tmp_path / "run"))


def test_what_a_training_came_to_is_kept(launch, tmp_path):
    report = launch(
        """
        emit("state", state="training")
        if index == 0:
            emit("checkpoint", step=5, path="/c/5")
            emit("result", step=5, metrics={"loss": 0.5}, seconds=1.0, examples=160)
        """
    )
    assert (report.exit_code, report.metrics, report.checkpoints) == (0, {"loss": 0.5}, {"/c/5": 5})
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["step"], result["examples"], result["metrics"]) == (5, 160, {"loss": 0.5})
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events if event.get("task") == "worker:0"] == [
        "started", "state", "checkpoint", "result", "exited"
    ]  # fmt: skip


def test_a_task_that_wrote_why_it_failed_keeps_its_own_error(launch, tmp_path):
    launch(
        """
        emit("state", state="training")
        if index == 1:
            with open(os.environ["TFDIST_TASK_DIR"] + "/error.json", "w") as file:
                file.write('{"message": "mine"}')
            sys.exit(2)
        time.sleep(1000)
        """
    )
    folder = tmp_path / "run" / "attempt_1"
    assert json.loads((folder / "worker-1" / "error.json").read_text()) == {"message": "mine"}


class FailingLauncher:
    """Starts nothing."""

    def __init__(self, error):
        self.error = error

    def start(self, plan, context):
        raise self.error


class FailingDesk(ScriptedRequests):
    """Accepts what it then has no plan for."""

    def __init__(self, error):
        super().__init__(None)
        self.plan = self.fail
        self.error = error

    def fail(self, _tasks):
        raise self.error


class Saves(ScriptedLauncher):
    """Has the chief tell of a checkpoint."""

    @asynccontextmanager
    async def start(self, plan, context):
        await context.events.put_output(
            RecordReceived(TaskId("chief"), {"kind": "checkpoint", "step": 5, "path": "/c/5"})
        )
        async with super().start(plan, context) as run:
            yield run


TAKEN = UsageError("127.0.0.1:2222 is taken")


@pytest.mark.parametrize(
    ("error", "code", "headline"),
    [
        (TAKEN, 2, "127.0.0.1:2222 is taken"),
        (OSError(24, "Too many open files"), 1, "OSError: [Errno 24] Too many open files"),
    ],
)
@pytest.mark.parametrize("resized", [True, False])
def test_an_error_of_the_launcher_is_what_was_caused_by_the_run(
    resized, error, code, headline, tmp_path, make_cluster, plan_for
):
    cluster = make_cluster("parameter_server", chief=1, worker=1, ps=1)
    launcher, desk = (Saves(), FailingDesk(error)) if resized else (FailingLauncher(error), None)
    with open_run_dir(tmp_path / "run", tmp_path, "x", NOW) as run_dir:
        plan = plan_for(cluster, "true", run_dir=run_dir.path)
        run_dir.save(plan)
        with pytest.raises(type(error)) as raised:
            Launch(launcher, plan, run_dir, JobPolicy(cluster.strategy), request_handler=desk).run(RunSnapshot())
    assert raised.value is error
    run_view = read_run(tmp_path / "run")
    assert (run_view.outcome, run_view.phase, run_view.headline) == (Outcome.FAILED, "ended", headline)
    assert (run_view.result["exit_code"], len(run_view.result["tasks"])) == (code, 3)
    assert run_view.can_resume == resized
    last = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["phase"], last["cause"]) == ("phase", "ended", headline)
