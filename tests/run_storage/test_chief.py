"""A chief that no launcher has started, with a program in place of its training: its record, its end."""

import json
import shutil
import sys
import uuid
from contextlib import contextmanager

import pytest

from tests.support.codes import raises
from tfdist_cli.errors import ResultNotSaved, TfdistError, UsageError
from tfdist_cli.launch.run.history import Outcome, read_run
from tfdist_cli.protocol.environment import Environment
from tfdist_cli.run_storage import stored_run
from tfdist_cli.run_storage.chief import run_chief, uploads_here
from tfdist_cli.run_storage.download import STATE, RunCopy, write_origin
from tfdist_cli.run_storage.lease import ENDED, LOST, Lease
from tfdist_cli.run_storage.stored_run import StoredRun
from tfdist_cli.run_storage.upload import FolderUpload
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.storage.remote import RemoteFolder


class UploadAtEnd:
    """In place of the process that uploads, which cannot see this process's memory."""

    problem = ""

    def __init__(self, stored, local):
        self._stored = stored
        self._local = local

    def finish(self, _code):
        remote = RemoteFolder(self._stored.url)
        FolderUpload(self._local, remote, self._stored.skipped).upload_changes(last=True)
        self._stored.lease.written(remote, ENDED)
        return self.problem


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a program as the chief of one run."""

    @contextmanager
    def uploading(stored, local):
        write_origin(local, stored.url, stored.lease.launch)
        yield UploadAtEnd(stored, local)

    monkeypatch.setattr(StoredRun, "uploading", uploading)
    monkeypatch.setattr(UploadAtEnd, "problem", "")
    return ChiefRun(Url(f"memory://{uuid.uuid4()}/digits"), tmp_path)


class ChiefRun:
    """A run, and what is known of it in the service."""

    def __init__(self, url, folder):
        self.url = url
        self.local = folder / "pod" / "digits"
        self._copy = folder / "copy"

    def __call__(self, program, recipe=None):
        environment = Environment(strategy="parameter_server", task=TaskId("chief"), run_dir=self.local)
        return run_chief(self.url, environment, recipe, [sys.executable, "-c", program])

    @property
    def view(self):
        RunCopy(self.url, self._copy, STATE).refresh()
        return read_run(self._copy)

    @property
    def events(self):
        lines = RemoteFolder(self.url).read("events.jsonl").splitlines()
        return [json.loads(line) for line in lines]


WRITE_ERROR = """
import json, os, pathlib, sys
error = {"message": "the loss is not finite", "code": "loss-not-finite"}
pathlib.Path(os.environ["TFDIST_TASK_DIR"], "error.json").write_text(json.dumps(error))
sys.exit(3)
"""
STOP = "import os, signal; os.kill(os.getppid(), signal.SIGTERM); signal.pause()"


@pytest.mark.parametrize(
    ("program", "code", "outcome", "headline"),
    [
        ("", 0, Outcome.DONE, ""),
        ("raise SystemExit(7)", 7, Outcome.FAILED, "chief:0: exit code 7"),
        (WRITE_ERROR, 3, Outcome.FAILED, "chief:0: the loss is not finite"),
        ("import os; os.kill(os.getpid(), 9)", 137, Outcome.FAILED, "chief:0: exit code 137"),
        (STOP, 143, Outcome.STOPPED, "chief:0: ended by SIGTERM"),
    ],
    ids=["done", "failed", "told why", "killed", "stopped"],
)
def test_how_it_ends_is_in_the_service(program, code, outcome, headline, run):
    assert run(program) == code
    assert (run.view.outcome, run.view.headline) == (outcome, headline)
    assert [str(each.task) for each in run.view.tasks] == ["chief:0"]
    assert run.view.tasks[0].state == outcome.value


@pytest.mark.parametrize(("name", "code"), [("no-such-program", 127), ("not-executable", 126)])
def test_a_program_that_cannot_be_executed(name, code, run, tmp_path):
    (tmp_path / "not-executable").touch()
    environment = Environment(strategy="parameter_server", task=TaskId("chief"), run_dir=run.local)
    with raises(UsageError, "program-not-executable"):
        run_chief(run.url, environment, None, [str(tmp_path / name)])
    view = read_run(run.local)
    assert (view.outcome, view.headline) == (Outcome.FAILED, f"chief:0: exit code {code}")


def test_a_run_continues_on_an_empty_disk(run):
    recipe = Recipe.model_validate({"module": "digits", "checkpoint": {"every_steps": 1, "dir": str(run.url)}})
    mark = "import os, pathlib; pathlib.Path(os.environ['TFDIST_TASK_DIR']).parents[1].joinpath('kept.csv').touch()"
    assert run(mark, recipe) == 0
    assert "module: digits" in RemoteFolder(run.url).read("recipe.yaml").decode()
    shutil.rmtree(run.local.parent)
    assert run("raise SystemExit(1)", recipe) == 1
    assert (run.local / "kept.csv").exists()
    assert [line["attempt"] for line in run.events if line["event"] == "launch"] == [1, 2]
    assert run.view.outcome is Outcome.FAILED


def test_a_request_is_refused(run):
    posted = """
import json, os, pathlib, signal, time
run = pathlib.Path(os.environ["TFDIST_TASK_DIR"]).parents[1]
path = run / "request-1.json"
path.write_text(json.dumps({"kind": "scale", "request": "1", "replicas": {"worker": 4}}))
os.kill(os.getppid(), signal.SIGURG)
while path.exists():
    time.sleep(0.01)  # there is no event to wait for
"""
    assert run(posted) == 0
    [answer] = [line for line in run.events if line["event"] == "scale"]
    assert (answer["request"], answer["answer"], answer["code"]) == ("1", "refused", "no-launcher")


def test_its_task_knows_that_its_parent_uploads(run):
    assert not uploads_here()
    program = "from tfdist_cli.run_storage.chief import uploads_here; raise SystemExit(0 if uploads_here() else 5)"
    assert run(program) == 0


@pytest.mark.parametrize("code", ["run-dir-in-use", "storage-unreachable"])
def test_what_may_pass_has_the_exit_code_of_a_failure(code, run, monkeypatch):
    """A scheduler does not start a task again that exits with 2."""
    RemoteFolder(run.url).write("plan.json", b"{}")
    Lease.new().written(RemoteFolder(run.url))

    def fail(*_):
        raise UsageError("now", code=code) if code == "run-dir-in-use" else ConnectionResetError

    monkeypatch.setattr(stored_run, "await_free", fail)
    with raises(TfdistError, code) as error:
        run("")
    assert error.value.exit_code == 1


def test_what_is_not_a_run_is_a_usage_error(run):
    RemoteFolder(run.url).write("thesis.txt", b"")
    with raises(UsageError, "not-a-run-dir"):
        run("")


def test_a_run_that_is_not_uploaded(run, monkeypatch):
    monkeypatch.setattr(UploadAtEnd, "problem", "2 files are not there")
    with raises(ResultNotSaved, "run-not-uploaded"):
        run("")
    assert run("raise SystemExit(4)") == 4, "the failure of the task counts more"


def test_a_killed_one_has_lost_its_run(run):
    assert run("") == 0
    remote = RemoteFolder(run.url)
    remote.write("events.jsonl", b"\n".join(remote.read("events.jsonl").splitlines()[:2]) + b"\n")
    Lease.read(remote).written(remote, LOST)
    assert run.view.outcome is Outcome.LOST
