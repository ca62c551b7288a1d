"""Which programs run in a fork: those that could not tell it from an interpreter of their own."""

import os
import sys
from pathlib import Path

import pytest

from tfdist_cli.launch.local import forkable

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has fork servers")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def examined(source, *argv, files=()):
    for name, text in {"train.py": source, **dict(files)}.items():
        file = Path(name)
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    argv = argv or (sys.executable, "train.py", "--epochs", "3")
    return forkable.can_fork(argv, os.environ), forkable.obstacle(argv, os.environ)


TRAINS = "import tensorflow as tf\n"


@pytest.mark.parametrize(
    "source",
    [
        "import tfdist_cli as tfdist",
        "import keras\nimport numpy as np\nimport json, os.path",
        "from tensorflow import keras\nimport os\nprint(os.environ['HOME'], os.environ.get('X'), 'Y' in os.environ)",
        "import tensorflow as tf\nfrom beside import data\nimport package.part\nfrom package import other",
    ],
)
def test_programs_that_only_import_what_is_known(folder, source):
    part = "from . import other\nfrom .other import x"
    files = {
        "package/__init__.py": "",
        "package/part.py": part,
        "package/other.py": "x = 1",
        "beside.py": "import math",
    }
    assert examined(source, files=files) == (True, None)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import os\nos.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'", "train.py, line 3,"),
        ("import os\nos.environ.setdefault('KERAS_BACKEND', 'tensorflow')", "train.py, line 3,"),
        ("from os import environ\nenviron |= {'X': '1'}", "train.py, line 3,"),
        ("import os\ndel os.environ['X']", "train.py, line 3,"),
        ("import os\nos.putenv('X', '1')", "train.py, line 3,"),
        ("import os\nchange(os.environ)", "train.py, line 3,"),
        ("import beside", "beside.py, line 2,"),
        ("def later():\n    import pandas", "train.py imports pandas"),
        ("from package.part import x", "deeper.py imports torch"),
        ("import importlib", "train.py imports importlib"),
    ],
)
def test_programs_that_would_differ_say_why(folder, source, cause):
    files = {
        "beside.py": "import os\nos.environ['X'] = '1'",
        "package/__init__.py": "",
        "package/part.py": "from .deeper import x",
        "package/deeper.py": "import torch",
    }
    forks, why = examined(TRAINS + source, files=files)
    assert not forks
    assert why is not None
    assert cause in why


@pytest.mark.parametrize("source", ["print(1)", "def later():\n    import tensorflow", "import tensorflow as"])
def test_programs_without_tensorflow_have_an_interpreter_without_more_words(folder, source):
    assert examined(source) == (False, None)


@pytest.mark.parametrize("relative", ["from ..beside import data", "from .... import beside"])
def test_an_import_from_above_the_program_is_left_to_an_interpreter(folder, relative):
    forks, cause = examined(TRAINS + relative)
    assert not forks
    assert cause.startswith("train.py ")


def test_a_module_may_import_from_a_package_above_its_own(folder):
    Path("outer").mkdir()
    empty = ("outer/__init__.py", "outer/beside.py", "outer/package/__init__.py", "outer/package/other.py")
    outer = {"outer/package/train.py": TRAINS + "from ..beside import data\nfrom . import other"}
    outer |= dict.fromkeys(empty, "")
    argv = (sys.executable, "-m", "outer.package.train")
    assert examined("", *argv, files=outer) == (True, None)


def test_modules_are_searched_in_the_folder_of_the_launcher(folder):
    argv = (sys.executable, "-m", "package.part")
    assert examined("", *argv, files={"package/__init__.py": "", "package/part.py": TRAINS}) == (True, None)


def test_packages_of_a_module_run_as_well(folder):
    argv = (sys.executable, "-m", "changing.part")
    files = {"changing/__init__.py": "import os\nos.environ['X'] = '1'", "changing/part.py": TRAINS}
    forks, why = examined("", *argv, files=files)
    assert not forks
    assert why is not None


@pytest.mark.parametrize(
    "argv",
    [
        ("/usr/bin/env", "python", "train.py"),
        (sys.executable, "-u", "train.py"),
        (sys.executable, "-c", "import tensorflow"),
        (sys.executable,),
        (sys.executable, "missing.py"),
        (sys.executable, "-m", "no.such.module"),
        ("no-such-python", "train.py"),
    ],
)
def test_other_commands_have_an_interpreter(folder, argv):
    assert examined(TRAINS, *argv) == (False, None)


def test_the_interpreter_of_another_environment_is_not_this_one(folder):
    other = folder / "venv" / "bin" / "python"
    other.parent.mkdir(parents=True)
    other.symlink_to(Path(sys.executable).resolve())
    assert examined(TRAINS, str(other), "train.py") == (False, None)


def test_an_interpreter_is_searched_on_the_tasks_path(folder):
    Path("train.py").write_text(TRAINS)
    argv = (Path(sys.executable).name, "train.py")
    assert forkable.can_fork(argv, {"PATH": str(Path(sys.executable).parent)})
    assert not forkable.can_fork(argv, {"PATH": str(folder)})


def test_tfdists_own_tasks_fork():
    assert forkable.can_fork((sys.executable, "-m", "tfdist_cli", "role", "cluster.yaml"), {})
