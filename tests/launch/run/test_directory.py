"""The run's directory: its contents, its lock, and errors."""

import json
import os
import stat
import subprocess
import sys
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

import pytest

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.run.directory import (
    LATEST,
    ORIGIN_FILE,
    SENT_FILE,
    UPLOAD_LOG_FILE,
    check_unused,
    open_run_dir,
    run_location,
    short_names,
)
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import CLUSTER_FILE, RECIPE_FILE, make_plan
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.loading.load import load_run
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.task_id import TaskId

NOON = datetime(2026, 3, 14, 12, 0, 0, tzinfo=timezone.utc)


@contextmanager
def opened(parent, chosen=None):
    with open_run_dir(chosen, parent, "digits", NOON) as run_dir:
        yield run_dir


def saved(run_dir, cluster, recipe=None):
    addresses = {task: Address("127.0.0.1", 4000 + number) for number, task in enumerate(cluster.tasks)}
    cluster, recipe = run_dir.resolve(cluster, recipe, addresses)
    plan = make_plan(cluster, recipe, addresses=addresses, run_dir=run_dir.path, machine=Machine(2))
    run_dir.save(plan)
    return plan


def test_a_new_directory_is_private_named_and_linked(tmp_path):
    with opened(tmp_path / "runs") as run_dir:
        assert run_dir.path == tmp_path / "runs" / "digits-20260314-120000"
        assert run_dir.attempt == 1
        assert run_dir.attempt_folder().is_dir()
        assert stat.S_IMODE(run_dir.path.stat().st_mode) == 0o700
        assert (tmp_path / "runs" / LATEST).resolve() == run_dir.path


def test_a_directory_that_was_made_for_a_run_becomes_private_too(tmp_path):
    path = tmp_path / "made"
    path.mkdir(mode=0o755)
    with opened(tmp_path, path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    path.chmod(0o750)
    with opened(tmp_path, path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o750


def test_a_directory_that_is_refused_is_left_as_it_is(tmp_path):
    path = tmp_path / "run"
    with opened(tmp_path, path):
        pass

    def refuse(given):
        raise UsageError(f"{given.name} is in use", code="still-running")

    with raises(UsageError, "still-running"), open_run_dir(path, tmp_path, "digits", NOON, refuse):
        pass
    assert [each.name for each in path.glob("attempt_*")] == ["attempt_1"]


def test_two_runs_in_one_second_have_a_directory_each(tmp_path):
    with opened(tmp_path) as first, opened(tmp_path) as second, opened(tmp_path) as third:
        assert [each.path.name for each in (first, second, third)] == [
            "digits-20260314-120000", "digits-20260314-120000-2", "digits-20260314-120000-3"
        ]  # fmt: skip
        assert (tmp_path / LATEST).resolve() == third.path


def test_a_chosen_directory_is_taken_as_it_is_and_not_linked(tmp_path):
    with opened(tmp_path / "runs", tmp_path / "a" / "b") as run_dir:
        assert run_dir.path == tmp_path / "a" / "b"
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "a" / LATEST).is_symlink()


def test_a_run_stays_in_its_directory_when_the_link_to_it_is_moved(tmp_path):
    with opened(tmp_path) as first:
        pass
    with opened(tmp_path, tmp_path / LATEST) as again, opened(tmp_path):
        assert again.path == first.path
        assert again.path.samefile(first.path)
        assert not again.path.samefile(tmp_path / LATEST)


def test_only_the_link_to_a_run_is_followed_and_not_the_folders_above_it(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to("disk")
    with opened(tmp_path / "home") as first:
        pass
    with opened(tmp_path / "home", tmp_path / "home" / LATEST) as again:
        assert again.path == first.path == tmp_path / "home" / first.path.name


def test_links_in_a_circle_are_reported(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with raises(UsageError, "run-directory-unusable") as caught, opened(tmp_path, tmp_path / "a"):
        pass
    assert "Too many levels" in caught.value.message


def test_the_run_that_was_launched_last_is_the_latest_though_it_is_an_earlier_one(tmp_path):
    with opened(tmp_path) as first, opened(tmp_path) as second:
        assert (tmp_path / LATEST).resolve() == second.path
    with opened(tmp_path, first.path):
        assert (tmp_path / LATEST).resolve() == first.path


def test_an_empty_directory_may_be_chosen(tmp_path):
    (tmp_path / "run").mkdir()
    with opened(tmp_path, tmp_path / "run") as run_dir:
        assert run_dir.attempt == 1


def test_an_earlier_run_continues_as_the_next_attempt(tmp_path, make_cluster):
    for attempt in (1, 2, 3):
        with opened(tmp_path, tmp_path / "run") as run_dir:
            assert run_dir.attempt == attempt
            saved(run_dir, make_cluster(worker=1))
    assert (tmp_path / "run" / "attempt_1").is_dir()


def test_a_relative_directory_starts_where_the_user_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with opened(tmp_path, Path("run")) as run_dir:
        assert run_dir.path == tmp_path / "run"


def test_a_launch_that_ended_before_its_plan_is_tried_again(tmp_path):
    for name in (ORIGIN_FILE, UPLOAD_LOG_FILE, SENT_FILE):
        (tmp_path / name).touch()
    with opened(tmp_path, tmp_path) as run_dir:
        assert run_dir.attempt == 1


def test_whether_a_directory_is_used(tmp_path):
    check_unused(tmp_path / "new")
    with opened(tmp_path) as run_dir, raises(UsageError, "run-dir-in-use") as caught:
        check_unused(run_dir.path)
    assert str(os.getpid()) in caught.value.message
    check_unused(run_dir.path)


def test_a_directory_with_other_things_in_it_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with raises(UsageError, "not-a-run-dir") as caught, opened(tmp_path, tmp_path):
        pass
    assert "thesis.tex" in caught.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_directory_that_another_launcher_has_is_refused_with_its_pid(tmp_path):
    with opened(tmp_path, tmp_path / "run"):
        with raises(UsageError, "run-dir-in-use") as caught, opened(tmp_path, tmp_path / "run"):
            pass
        assert str(tmp_path / "run") in caught.value.message
        assert f"pid {os.getpid()}" in caught.value.message


def test_the_lock_of_a_killed_launcher_keeps_no_process_out(tmp_path):
    script = (
        "import os, sys; from pathlib import Path; from datetime import datetime;"
        "from tfdist_cli.launch.run.directory import open_run_dir;"
        "open_run_dir(Path(sys.argv[1]), Path(), 'x', datetime.now()).__enter__(); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", script, tmp_path / "run"], check=False)
    assert killed.returncode == -9
    with opened(tmp_path, tmp_path / "run") as run_dir:
        assert run_dir.attempt == 2


@pytest.mark.parametrize("parent", ["file", "file/below"])
def test_a_file_in_the_way(tmp_path, parent):
    (tmp_path / "file").touch()
    with raises(UsageError, "run-directory-unusable") as caught, opened(tmp_path / parent):
        pass
    assert str(tmp_path / "file") in caught.value.message
    with raises(UsageError, "run-directory-unusable"), opened(tmp_path, tmp_path / parent):
        pass


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc is what even root may not write in")
def test_a_directory_that_may_not_be_written():
    with raises(UsageError, "run-directory-unusable") as caught, opened(Path("/proc/runs")):
        pass
    assert "/proc/runs" in caught.value.message
    assert "--run-dir" in str(caught.value.hint)


def test_a_full_disk(tmp_path, make_cluster, monkeypatch):
    with opened(tmp_path) as run_dir:

        def full(*args, **kwargs):
            raise OSError(28, "No space left on device", "plan.json")

        monkeypatch.setattr(Path, "write_text", full)
        with raises(UsageError, "disk-full") as caught:
            saved(run_dir, make_cluster(worker=1))
        assert "plan.json" in caught.value.message


def test_what_is_saved_loads_back_to_what_was_planned(tmp_path, make_cluster):
    cluster = make_cluster("parameter_server", chief=1, worker=2, ps=1, evaluator=1)
    recipe = Recipe.model_validate(
        {"module": "digits", "module_dir": str(tmp_path), "checkpoint": {"every_steps": 5}, "params": {"a": "${HOME}"}}
    )
    with opened(tmp_path / "runs") as run_dir:
        plan = saved(run_dir, cluster, recipe)
        loaded, loaded_recipe = load_run(run_dir.path / CLUSTER_FILE)
        assert loaded == plan.cluster
        assert loaded_recipe == plan.recipe
        assert {task: loaded.address(task) for task in loaded.tasks} == {each.task: each.address for each in plan.tasks}
        assert loaded.recipe == run_dir.path / RECIPE_FILE
        assert loaded_recipe
        assert loaded_recipe.checkpoint
        assert loaded_recipe.checkpoint.dir == run_dir.path / "checkpoints"
        assert json.loads((run_dir.path / "plan.json").read_text()) == json.loads(json.dumps(plan.as_json()))


def test_a_cluster_without_a_recipe_names_none(tmp_path, make_cluster):
    with opened(tmp_path) as run_dir:
        saved(run_dir, make_cluster(worker=1, evaluator=0))
        cluster, recipe = load_run(run_dir.path / CLUSTER_FILE)
        assert cluster.recipe is None
        assert recipe is None
        assert not (run_dir.path / RECIPE_FILE).exists()


def test_a_checkpoint_folder_that_was_given_stays(tmp_path, make_cluster):
    recipe = Recipe.model_validate(
        {"module": "x", "module_dir": "/", "checkpoint": {"every_steps": 5, "dir": "/data/ckpt"}}
    )
    with opened(tmp_path) as run_dir:
        assert saved(run_dir, make_cluster(worker=1), recipe).recipe.checkpoint.dir == Path("/data/ckpt")


def test_an_error_that_the_task_has_written_itself_is_kept(tmp_path):
    with opened(tmp_path) as run_dir:
        for task in (TaskId("worker", 0), TaskId("worker", 1)):
            (run_dir.attempt_folder() / task.slug).mkdir()
        own = run_dir.attempt_folder() / "worker-0" / "error.json"
        own.write_text("{}")
        run_dir.save_error(own.parent, {"message": "no"})
        run_dir.save_error(run_dir.attempt_folder() / "worker-1", {"message": "no"})
        assert own.read_text() == "{}"
        assert json.loads((run_dir.attempt_folder() / "worker-1" / "error.json").read_text()) == {"message": "no"}


def test_where_a_run_is_stored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    local = Cluster.model_validate({"strategy": "single", "roles": {"chief": {}}, "name": "digits"})
    stored = local.model_copy(update={"run_dir": Url("s3://bucket/runs")})
    url, runs = Url("s3://bucket/other/a"), tmp_path / "runs"
    assert run_location(None, local) == (None, runs)
    assert run_location(tmp_path, stored) == (tmp_path, tmp_path)
    assert run_location(url, local) == (url, runs / "a")
    (at, path), (again, _) = run_location(None, stored), run_location(None, stored)
    assert (str(at).startswith("s3://bucket/runs/digits-"), path) == (True, runs / at.name)
    assert at != again
    (tmp_path / "bucket.json").write_text(f'{{"url": "{url}"}}')
    assert run_location(tmp_path, local) == (url, tmp_path), "a run that was stored continues so"


@pytest.mark.parametrize(
    ("runs", "names"),
    [
        (["/a/one", "/b/two"], ["one", "two"]),
        (["/a/run", "s3://bucket/run", "/c/other"], ["a/run", "bucket/run", "other"]),
        (["/x/a/run", "/y/a/run", "/run"], ["a/run (1)", "a/run (2)", "/run"]),
        (["/a/run", "/a/run"], ["a/run (1)", "a/run (2)"]),
    ],
)
def test_names_tell_runs_apart(runs, names):
    assert short_names(runs) == names
