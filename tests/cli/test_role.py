"""`tfdist role`: the task it becomes, and what it says when it cannot be one."""

import json
import os
from pathlib import Path

import pytest

from tfdist_cli.cli import role as module
from tfdist_cli.environment import Environment
from tfdist_cli.spec.task_id import TaskId


@pytest.fixture(autouse=True)
def _own_environment(tmp_path, monkeypatch):
    """What a task sets in its environment is gone after the test."""
    monkeypatch.chdir(tmp_path)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TF_CONFIG", "TFDIST_"))}
    for name in ("http_proxy", "https_proxy", "no_proxy", "NO_PROXY", "no_grpc_proxy"):
        kept.pop(name, None)
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(kept)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def started(monkeypatch):
    """The recipe of the task that was started, with nothing run."""
    seen = []

    def run_task(recipe):
        seen.append(recipe)
        return 0

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(module, "run_task", run_task)
    monkeypatch.setattr(module, "leave", leave)
    return seen


def tf_config(role, index=0, **cluster):
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})


PS = {"chief": ["127.0.0.1:3001"], "worker": ["127.0.0.1:3002"], "ps": ["127.0.0.1:3003"]}


def test_a_task_of_a_file(tfdist, cluster_file, started, tmp_path):
    assert tfdist("role", "--task", "worker:1", "-c", cluster_file, "-r", "digits.yaml").code == 0
    assert [recipe.module for recipe in started] == ["digits"]
    environment = Environment.read()
    assert (environment.task, environment.strategy) == (TaskId("worker", 1), "parameter_server")
    assert {str(task): str(address) for task, address in environment.addresses.items()} == {
        "chief:0": "127.0.0.1:2222",
        "worker:0": "127.0.0.1:2223",
        "worker:1": "127.0.0.1:2224",
        "ps:0": "127.0.0.1:2300",
    }
    assert environment.run_dir == tmp_path / "runs" / "cluster"
    assert environment.run_dir.is_dir()
    assert environment.run_dir.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("role", ["ps", "worker", "chief", "evaluator"])
def test_a_task_of_tf_config_needs_no_option(role, tfdist, started):
    tf_config(role, **PS)
    assert tfdist("role").code == 0
    assert started == [None]
    assert Environment.read().task == TaskId(role)
    assert json.loads(os.environ["TF_CONFIG"])["cluster"] == PS


@pytest.mark.parametrize(
    ("cluster", "role"),
    [
        ({"worker": ["a:1", "b:1"]}, "worker"),
        ({"worker": ["a:1", "b:1"]}, "evaluator"),
        ({"chief": ["a:1"], "worker": ["b:1"], "evaluator": ["c:1"]}, "evaluator"),
        ({"worker": ["a:1"]}, "worker"),
        ({"chief": ["a:1"]}, "chief"),
    ],
)
def test_every_cluster_that_trains_is_one(cluster, role, tfdist, started, cluster_file):
    tf_config(role, **cluster)
    result = tfdist("role", "-r", "digits.yaml", "--set", "train.epochs=3")
    assert (result.code, result.err) == (0, "")
    assert started[0].train.epochs == 3


def test_what_a_scheduler_has_set_stays(tfdist, started, tmp_path):
    tf_config("worker", **PS)
    os.environ |= {"TF_NUM_INTRAOP_THREADS": "7", "TFDIST_RUN_DIR": str(tmp_path / "given"), "no_proxy": "else.where"}
    assert tfdist("role").code == 0
    assert os.environ["TF_NUM_INTRAOP_THREADS"] == "7"
    assert Environment.read().run_dir == tmp_path / "given"
    assert os.environ["no_proxy"].startswith("else.where,127.0.0.1")


def test_an_option_counts_more_than_the_environment(tfdist, started, tmp_path):
    tf_config("worker", **PS)
    os.environ |= {"TFDIST_RUN_DIR": str(tmp_path / "given"), "TFDIST_START_TIMEOUT": "9"}
    assert tfdist("role", "--run-dir", tmp_path / "option", "--start-timeout", "4").code == 0
    assert Environment.read().run_dir == tmp_path / "option"
    assert Environment.read().start_timeout == 4
    assert not (tmp_path / "given").exists()


def test_a_command_takes_the_tasks_place(tfdist, started, monkeypatch):
    run = []

    def execvp(file, argv):
        run.append((file, argv, os.environ["TFDIST_STRATEGY"]))
        raise SystemExit(0)

    monkeypatch.setattr(os, "execvp", execvp)
    tf_config("chief", **PS)
    assert tfdist("role", "--", "python", "train.py", "--lr", "0.1").code == 0
    assert run == [("python", ["python", "train.py", "--lr", "0.1"], "parameter_server")]
    assert started == []


def expect(result, code, *texts):
    assert result.code == code
    assert result.err.startswith("error: ")
    assert "hint: " in result.err
    assert "Traceback" not in result.err
    for text in texts:
        assert text in " ".join(result.err.split())


def test_nothing_says_which_cluster(tfdist, started):
    expect(tfdist("role"), 2, "nothing says which cluster this task belongs to")


def test_nothing_says_which_task(tfdist, started, cluster_file):
    expect(tfdist("role", "-c", cluster_file), 2, "which task is this?")


@pytest.mark.parametrize("task", ["worker:7", "evaluator", "boss", "worker:x"])
def test_a_task_that_the_cluster_does_not_have(task, tfdist, started, cluster_file):
    expect(tfdist("role", "-c", cluster_file, "--task", task), 2, task, "chief:0, worker:0, worker:1, ps:0")


def test_a_task_that_is_not_tf_configs(tfdist, started):
    tf_config("ps", **PS)
    expect(tfdist("role", "--task", "worker"), 2, "TF_CONFIG says that this is ps:0, not worker")


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"cluster": {"master": ["a:1"]}, "task": {"type": "master", "index": 0}}']
)
def test_a_tf_config_that_cannot_be_read(text, tfdist, started):
    os.environ["TF_CONFIG"] = text
    expect(tfdist("role"), 2, "TF_CONFIG cannot be read")


def test_a_tf_config_of_no_cluster_that_trains(tfdist, started):
    tf_config("ps", ps=["a:1"])
    expect(tfdist("role"), 2, "TF_CONFIG describes no cluster that can train", "parameter_server needs a chief")


def test_a_run_directory_that_cannot_be_made(tfdist, started, tmp_path):
    tf_config("ps", **PS)
    (tmp_path / "file").write_text("")
    expect(tfdist("role", "--run-dir", tmp_path / "file" / "run"), 2, "cannot be made: Not a directory")


def test_a_command_that_is_not_there(tfdist, started):
    tf_config("ps", **PS)
    expect(tfdist("role", "--", "no-such-program-here"), 2, "'no-such-program-here' cannot be run: No such file")


def test_a_recipe_that_is_not_there(tfdist, started, tmp_path):
    tf_config("chief", **PS)
    result = tfdist("role", "-r", tmp_path / "none.yaml")
    assert result.code == 2
    assert "none.yaml" in result.err
    assert not Path("runs").exists()


@pytest.mark.parametrize("seconds", ["0", "-3", "nan"])
def test_a_timeout_that_is_none(seconds, tfdist, started):
    tf_config("ps", **PS)
    expect(tfdist("role", "--start-timeout", seconds), 2, "a number of seconds above 0")


def test_a_task_reads_its_secrets_unless_it_has_been_given_them(tfdist, tmp_path, started):
    (tmp_path / "key").write_text("from the file\n")
    (tmp_path / "secret.yaml").write_text(
        "strategy: single\nroles: {chief: {secrets: {KEY: {file: key}, TOKEN: {file: nowhere}}}}\n"
    )
    assert "roles.chief.secrets.TOKEN: " in tfdist("role", "--task", "chief", "-c", "secret.yaml").err
    os.environ["TOKEN"] = "from a scheduler"
    assert tfdist("role", "--task", "chief", "-c", "secret.yaml").code == 0
    assert (os.environ["KEY"], os.environ["TOKEN"]) == ("from the file", "from a scheduler")
    assert os.environ["TFDIST_SECRETS"] == "KEY,TOKEN"
