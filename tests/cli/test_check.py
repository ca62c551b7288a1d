"""`tfdist check`, with a process that is replaced, and `tfdist launch`'s part of it."""

import json

import pytest

from tfdist_cli.cli import check
from tfdist_cli.finding import Finding
from tfdist_cli.protocol.check_report import Report

pytestmark = pytest.mark.tensorflow

MODULE = "def model(params): ...\ndef dataset(params, split, shard):\n    return make(shard)\n"
FACTS = {
    "shards": {"count": 2, "examples": [5, 5]},
    "model": {"name": "one", "optimizer": "Adam", "parameters": 19, "weights_bytes": 76, "slots_bytes": 152},
    "data": {"batch": "x float32 (8, 4)", "steps_per_epoch": 12, "epochs": 2, "steps": 24},
    "network": {"pulled_bytes": 76, "pushed_bytes": 80, "tables_by_rows": 1, "at_most": False},
    "step": {"loss": 0.5},
    "task worker:0": {"variables_bytes": 0, "memory_bytes": 2 * 10**9, "base_bytes": 10**9},
}


@pytest.fixture
def started():
    """The arguments of each process that was started."""
    return []


@pytest.fixture
def recipe(cluster_file, started, monkeypatch):
    """A cluster file whose recipe is well, and what the process would report."""
    cluster_file.write_text(cluster_file.read_text() + "recipe: digits.yaml\n")
    (cluster_file.parent / "digits.py").write_text(MODULE)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("KERAS_HOME", str(cluster_file.parent))

    def report_of(*findings):
        report = Report("done", findings, FACTS)

        def check_recipe(*arguments):
            started.append(arguments)
            return report

        monkeypatch.setattr(check, "check_recipe", check_recipe)
        return cluster_file

    return report_of


def test_no_problems(tfdist, recipe):
    result = tfdist("check", recipe())
    assert (result.code, result.err) == (0, "")
    (network,) = [line for line in result.out.splitlines() if line.startswith("network")]
    assert all(size in network for size in ("76 bytes", "80 bytes"))
    (worker,) = [line for line in result.out.splitlines() if line.startswith("worker:0")]
    assert worker.split() == ["worker:0", "2.0", "GB"]


def test_data_of_unknown_length(tfdist, recipe, monkeypatch):
    monkeypatch.setitem(FACTS, "data", {"batch": "x", "steps_per_epoch": None, "epochs": 2, "steps": None})
    lines = tfdist("check", recipe()).out.splitlines()
    (training,) = [line for line in lines if line.startswith("training")]
    assert training.split() == ["training", "2", "epochs"]


def test_a_finding_has_a_place_and_a_fix(tfdist, recipe):
    path = recipe(Finding("no-targets", "error", "", "none", "some"))
    recipe(Finding("no-targets", "error", f"{path.parent}/digits.py:3", "none", "some"))
    result = tfdist("check", path)
    assert result.code == 2
    assert result.out.splitlines()[-3:-1] == ["error [no-targets] digits.py:3: none", "  fix: some"]


def test_a_warning_is_no_error(tfdist, recipe):
    result = tfdist("check", recipe(Finding("slow", "warning", "x", "it is", "mend it")), "--json")
    told = json.loads(result.out)
    assert (result.code, told["ok"], told["facts"]) == (0, True, FACTS)
    assert [each["code"] for each in told["findings"]] == ["slow"]


def test_the_quick_part_starts_no_process(tfdist, recipe, started):
    path = recipe()
    assert tfdist("check", path, "--quick").code == 0
    (path.parent / "digits.py").write_text(MODULE.replace("make(shard)", "tf.data.Dataset.range(9)"))
    result = tfdist("check", path)
    assert result.code == 2
    assert "error [shard-ignored] digits.py:2: " in result.out
    assert not started


def test_a_problem_is_told_once(tfdist, recipe, monkeypatch):
    path = recipe()
    (path.parent / "digits.py").write_text(MODULE.replace("make(shard)", "make()"))
    again = Finding("shard-ignored", "warning", f"{path.parent}/digits.py:2", "again", "")
    recipe(again)
    assert tfdist("check", path).out.count("shard-ignored") == 1


def test_tasks_are_passed_on(tfdist, recipe, started):
    assert tfdist("check", recipe(), "--task", "worker:1", "-t", "chief").code == 0
    assert [str(task) for task in started[0][2]] == ["worker:1", "chief:0"]


@pytest.mark.parametrize(("task", "code"), [("worker:7", "no-such-task"), ("wrker:0", "invalid-task")])
def test_a_task_that_is_not_there(tfdist, recipe, task, code):
    result = tfdist("check", recipe(), "--task", task)
    assert result.code == 2
    assert result.err.startswith(f"error[{code}]")


def test_a_limit_that_is_too_low(tfdist, recipe):
    result = tfdist("check", recipe(), "-s", "roles.worker.memory=1GiB")
    assert result.code == 0
    assert "warning [task-memory] worker:0: " in result.out


@pytest.mark.parametrize(
    ("text", "code"), [("tf.data.Dataset.range(9)", "shard-ignored"), ("make(", "module-syntax-error")]
)
def test_a_launch_makes_the_quick_part_and_starts_nothing(tfdist, recipe, text, code):
    path = recipe()
    (path.parent / "digits.py").write_text(MODULE.replace("make(shard)", text))
    result = tfdist("launch", path)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error[{code}]: {path.parent}/digits.py:")
    assert "\nhint: " in result.err
    assert not (path.parent / "runs").exists()


def test_a_launch_with_another_backend(tfdist, recipe, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    result = tfdist("launch", recipe())
    assert result.code == 2
    assert result.err.startswith("error[keras-backend]: role chief: ")
