"""Mapping folders of this machine to a host."""

import sys
from pathlib import Path

import pytest
import yaml

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.ssh.paths import Copies, files_at, give_id, paths_of, task_at
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import make_plan
from tfdist_cli.spec.sections.recipe import Recipe


@pytest.fixture
def make_plan_of(make_cluster):
    def make(cluster, recipe, run_dir):
        addresses = {task: cluster.address(task) for task in cluster.tasks}
        return make_plan(cluster, recipe, addresses=addresses, run_dir=run_dir, machine=Machine(1))

    return make


def recipe_in(folder, **more):
    return Recipe.model_validate({"module": "digits", "module_dir": folder, **more})


def test_paths_of_a_recipe_its_run_and_its_checkpoints(make_cluster, make_plan_of, tmp_path):
    project = tmp_path / "ü p"
    project.mkdir()
    kept = {"every_steps": 5, "dir": project / "kept"}
    cluster = make_cluster("single", chief=1).model_copy(update={"recipe": project / "recipe.yaml"})
    plan = make_plan_of(cluster, recipe_in(project, checkpoint=kept), tmp_path / "runs" / "digits-1")
    paths = paths_of(plan, Copies.of(cluster, cluster.recipe)).at_home("/home/me")
    assert paths.there(str(plan.run_dir / "cluster.yaml")) == "/home/me/.tfdist/runs/digits-1/ID/cluster.yaml"
    copied = paths.there(str(project))
    assert copied.startswith("/home/me/.tfdist/sync/cluster-")
    assert copied.endswith("/ü p")
    assert paths.start == copied, "the current folder is not copied"
    assert paths.there("/etc/hosts") == "/etc/hosts"
    assert paths.there(f"{project}er") == f"{project}er"
    task = task_at(plan.tasks[0], paths, "/opt/python")
    assert task["argv"][0] == "/opt/python"
    assert task["argv"][-2:] == ["/home/me/.tfdist/runs/digits-1/ID/cluster.yaml", "--planned"]
    assert task["env"]["TFDIST_RUN_DIR"] == "/home/me/.tfdist/runs/digits-1/ID"
    files = {name: yaml.safe_load(text) for name, text in files_at(plan, paths).items()}
    assert files["cluster.yaml"]["recipe"] == "recipe.yaml"
    assert files["recipe.yaml"]["module_dir"] == copied
    assert files["recipe.yaml"]["checkpoint"]["dir"] == f"{copied}/kept"


def test_shared_files_have_the_same_paths(make_cluster, make_plan_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cluster = make_cluster("single", ssh={"shared": True}, chief=1)
    plan = make_plan_of(cluster, recipe_in(tmp_path), tmp_path / "runs" / "x")
    assert Copies.of(cluster, tmp_path / "recipe.yaml") is None
    paths = paths_of(plan, None)
    assert paths.start == str(tmp_path)
    assert task_at(plan.tasks[0], paths, sys.executable) == plan.tasks[0].as_json()


def test_folders_that_the_user_names(make_cluster, tmp_path, monkeypatch):
    (tmp_path / "p" / "src").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "p" / "src")
    roots = [tmp_path / "p", tmp_path / "data"]
    cluster = make_cluster("single", ssh={"sync": roots, "to": "/scratch/x", "run_dir": "~/runs"}, chief=1)
    copies = Copies.of(cluster, None)
    paths = copies.paths(Path("/runs/y"), cluster.ssh.run_dir).at_home("/root")
    assert copies.roots == tuple(roots)
    assert [str(there) for _, there in paths.pairs] == ["/root/runs/y/ID", "/scratch/x/p", "/scratch/x/data"]
    assert paths.start == "/scratch/x/p/src"


def test_runs_of_the_same_name_have_separate_directories_on_a_host(make_cluster, tmp_path):
    copies = Copies.of(make_cluster("single", chief=1), None)
    one, other = (tmp_path / folder / ("x" * 250) for folder in ("a", "b"))

    def there(run_dir):
        give_id(run_dir)
        return copies.paths(run_dir, None).there(str(run_dir))

    for run_dir in (one, other):
        run_dir.mkdir(parents=True)
    assert there(one) == there(one), "a continued run"
    assert there(one) != there(other)
    (one / "hosts_id").unlink()
    with raises(UsageError, "run-dir-not-writable"):
        give_id(tmp_path / "gone")


def test_projects_have_separate_folders_on_a_host(make_cluster, tmp_path):
    cluster = make_cluster("single", chief=1)
    one, other = (Copies.of(cluster, tmp_path / folder / "recipe.yaml") for folder in ("a", "b"))
    assert one.to != other.to
    assert one.origin != other.origin
    assert one == Copies.of(cluster, tmp_path / "a" / "another.yaml")
    roots = [tmp_path / "a", tmp_path / "data"]
    more = Copies.of(make_cluster("single", ssh={"sync": roots, "to": "/scratch"}, chief=1), None)
    assert more.origin == one.origin, "further roots may change"
