"""`tfdist init`."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tfdist_cli.cli import init
from tfdist_cli.spec.loading.load import load_run

SCRIPT = """
import keras
import numpy as np

x = np.ones((64, 3), np.float32)
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, x[:, :1], epochs=2, verbose=0)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def answers(monkeypatch):
    """Answers questions as a terminal would; returns the questions."""

    def of(*given):
        asked, left = [], list(given)

        def prompt(question, default, **_):
            asked.append(question.partition(" ")[0])
            return (left.pop(0) or default) if left else default

        monkeypatch.setattr(init, "_asks", lambda: True)
        monkeypatch.setattr(typer, "prompt", prompt)
        return asked

    return of


def next_commands(out):
    """The commands that the output names, as argv of `tfdist`."""
    return [shlex.split(line)[1:] for line in out.partition("Next:")[2].splitlines() if line.strip()]


@pytest.mark.tensorflow
def test_a_recipe(tfdist, here):
    result = tfdist("init", "project")
    assert (result.code, result.err) == (0, "")
    check, launch = next_commands(result.out)
    assert (check[0], launch[0]) == ("check", "launch")
    assert tfdist("validate", launch[1]).code == 0
    assert tfdist("check", launch[1], "--quick").code == 0


def test_a_program(tfdist, here):
    result = tfdist("init", "project", "--program", "--strategy", "multi_worker_mirrored", "--workers", "3")
    assert result.code == 0
    cluster, recipe = load_run(here / "project" / "cluster.yaml")
    assert (cluster.roles.count("worker"), recipe) == (3, None)
    _, launch = next_commands(result.out)
    assert tfdist("launch", "--dry-run", *launch[1:]).code == 0


def test_the_demo(tfdist, here):
    result = tfdist("init", "--demo")
    _, launch = next_commands(result.out)
    assert tfdist("validate", launch[1]).code == 0


def test_a_script(tfdist, here):
    (here / "train.py").write_text(SCRIPT)
    result = tfdist("init", "--from", "train.py")
    assert (result.code, result.err) == (0, "")
    assert (here / "train.py").read_text() == SCRIPT
    assert "tfdist.fit(model, x, x[:, :1], epochs=2, verbose=0)" in (here / "train_tfdist.py").read_text()
    assert tfdist("validate", "cluster.yaml").code == 0


def test_the_changes_of_a_script(tfdist, here):
    (here / "train.py").write_text(SCRIPT)
    result = tfdist("init", "--from", "train.py", "--diff")
    assert [path.name for path in here.iterdir()] == ["train.py"]
    patch = subprocess.run(["patch", "train.py"], input=result.out, text=True, capture_output=True, check=False)
    assert patch.returncode == 0, patch.stderr
    assert "tfdist.scope()" in (here / "train.py").read_text()


def test_questions(tfdist, here, answers):
    asked = answers("asked", "parameter_server", 4, 2, "program")
    assert tfdist("init").code == 0
    assert asked == ["folder", "strategy", "workers", "parameter", "recipe"]
    cluster, recipe = load_run(here / "asked" / "cluster.yaml")
    assert (cluster.roles.count("worker"), cluster.roles.count("ps"), recipe) == (4, 2, None)


def test_only_what_is_open_is_asked(tfdist, here, answers):
    asked = answers()
    assert tfdist("init", "project", "--strategy", "single", "--recipe").code == 0
    assert not asked


def test_a_wrong_answer_is_asked_again(tfdist, here, answers):
    asked = answers("project", "nothing", "mirrored")
    assert tfdist("init", "--").code == 0
    assert asked[:3] == ["folder", "strategy", "strategy"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--strategy", "single", "--workers", "3"], "option-not-for-strategy"),
        (["--strategy", "multi_worker_mirrored", "--ps", "1"], "option-not-for-strategy"),
        (["--diff"], "diff-without-script"),
        (["--demo", "--from", "x.py"], "demo-and-script"),
        *[
            (["--demo", *more], "option-not-for-demo")
            for more in (["--program"], ["--recipe"], ["--strategy", "mirrored"], ["--workers", "2"], ["--name", "x"])
        ],
        (["--from", "nowhere.py"], "no-such-file"),
    ],
)
def test_bad_usage(tfdist, here, arguments, code):
    result = tfdist("init", "project", *arguments)
    assert result.code == 2
    assert result.err.startswith(f"error[{code}]")
    assert not (here / "project").exists()


def test_a_missing_script_is_looked_for_among_scripts(tfdist, here):
    (here / "train.py").write_text(SCRIPT)
    (here / "cluster.yaml").write_text("")
    for name in ("trian.py", "nosuch.py"):
        hint = tfdist("init", "--from", name).err.partition("hint:")[2]
        assert "train.py" in hint
        assert "cluster.yaml" not in hint


def test_existing_files(tfdist, here):
    assert tfdist("init").code == 0
    assert tfdist("init").err.startswith("error[file-exists]")
    assert tfdist("init", "--force").code == 0


def test_names_of_folders_become_names_of_clusters(tfdist, here):
    result = tfdist("init", "Mein Ordner: 'ä' #1")
    assert tfdist("validate", next_commands(result.out)[1][1]).code == 0
    cluster, _ = load_run(here / "Mein Ordner: 'ä' #1" / "cluster.yaml")
    assert re.fullmatch(r"[a-z0-9-]+", cluster.name)
    Path("---").mkdir()
    assert tfdist("init", "--program", "--", "---").code == 0


@pytest.mark.parametrize("name", ["2026", "1e3", "0x1f", "true", "NULL", "no", "latest", "a" * 101, "b" * 99 + "-c"])
def test_names_with_another_meaning(name, tfdist, here):
    result = tfdist("init", name)
    assert result.code == 0
    assert tfdist("validate", next_commands(result.out)[1][1]).code == 0
    cluster, _ = load_run(here / name / "cluster.yaml")
    assert name == "latest" or name.lower().startswith(cluster.name)


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.tensorflow
@pytest.mark.parametrize("start", [["project"], ["project", "--program"], ["project", "--from", "train.py"]])
def test_what_is_written_is_checked_as_it_is(tfdist, here, start):
    (here / "train.py").write_text(SCRIPT)
    check, _ = next_commands(tfdist("init", *start).out)
    command = [sys.executable if word == "python" else word for word in check]
    result = tfdist(*command)
    assert result.code == 0, result.out
    assert Path("project").is_dir()
