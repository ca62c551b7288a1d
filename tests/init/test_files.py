"""The files of a new project."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest

import tfdist_cli
from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.init.demo import FILES, demo_files
from tfdist_cli.init.files import write_files
from tfdist_cli.init.templates import Project, program_files, recipe_files
from tfdist_cli.spec.loading.load import load_run
from tfdist_cli.spec.strategies import Strategy

ROOT = Path(__file__).parents[2]
COMMENT = re.compile(r"# yaml-language-server: \$schema=(.+)")


@pytest.mark.parametrize("files", [recipe_files, program_files])
@pytest.mark.parametrize("strategy", get_args(Strategy))
def test_projects_of_all_strategies_load(tmp_path, strategy, files):
    write_files(tmp_path, files(Project("mine", strategy, workers=3, ps=2)), force=False)
    cluster, recipe = load_run(tmp_path / "cluster.yaml")
    assert (cluster.name, cluster.strategy) == ("mine", strategy)
    assert cluster.roles.count("worker") in (0, 3)
    assert cluster.roles.count("ps") == (2 if strategy == "parameter_server" else 0)
    assert (recipe is None) == (files is program_files)


def test_the_first_line_names_the_schema(tmp_path):
    written = write_files(tmp_path, recipe_files(Project("mine")), force=False)
    for path in (each for each in written if each.suffix == ".yaml"):
        match = COMMENT.fullmatch(path.read_text().splitlines()[0])
        assert match
        schema = json.loads((path.parent / match[1]).read_text())
        assert schema["title"].lower() in path.stem.lower()


def test_python_files_are_python():
    for files in (recipe_files(Project("mine")), program_files(Project("mine"))):
        for name in (each for each in files if each.endswith(".py")):
            compile(files[name], name, "exec")


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "recipe.py").write_text("mine")
    with raises(UsageError, "file-exists"):
        write_files(tmp_path, recipe_files(Project("mine")), force=False)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.py"]
    write_files(tmp_path, recipe_files(Project("mine")), force=True)
    assert (tmp_path / "recipe.py").read_text() != "mine"


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "here").write_text("")
    with raises(UsageError, "not-a-folder"):
        write_files(tmp_path / "here", {"a": ""}, force=False)
    with raises(UsageError, "cannot-write"):
        write_files(tmp_path / "here" / "below", {"a": ""}, force=False)


def test_the_demo_is_that_of_the_repository(tmp_path):
    write_files(tmp_path, demo_files(), force=False)
    assert all((tmp_path / name).read_bytes() == (ROOT / name).read_bytes() for name in FILES)
    for name in FILES:
        if name.startswith("configs/"):
            cluster, _ = load_run(tmp_path / name)
            assert cluster.recipe
            assert cluster.recipe.is_relative_to(tmp_path)


def test_the_wheel_has_the_demo():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("[tool.hatch.build.targets.wheel.force-include]\n")[2].partition("\n[")[0]
    pairs = re.findall(r'^"(.+)" = "(.+)"$', section, re.MULTILINE)
    assert pairs == [(name, f"tfdist_cli/demo/{name}") for name in FILES]


def test_an_installed_demo_is_read_from_the_package(tmp_path, monkeypatch):
    for name in FILES:
        (tmp_path / "tfdist_cli" / "demo" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tfdist_cli" / "demo" / name).write_text("installed")
    monkeypatch.setattr(tfdist_cli, "__file__", str(tmp_path / "tfdist_cli" / "__init__.py"))
    assert set(demo_files().values()) == {"installed"}
