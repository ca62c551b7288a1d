"""Snippets of README.md and docs/: YAML loads, Python compiles or runs, commands parse, links lead somewhere."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tfdist_cli.cli.app import COMMANDS, load_command
from tfdist_cli.spec.loading.load import load_cluster, load_recipe, load_run
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe

ROOT = Path(__file__).parents[2]
SINGLE = ("README.md", "CONTRIBUTING.md", "configs/README.md", "benchmarks/README.md")
PAGES = [*(ROOT / name for name in SINGLE), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^]]*\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)")


class Snippet(NamedTuple):
    page: Path
    line: int
    language: str
    text: str

    @property
    def title(self):
        """The file that its first line names."""
        return self.text.partition("\n")[0].removeprefix("# ")


def snippets_of(page):
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        yield Snippet(page, text.count("\n", 0, match.start()) + 1, match[1], match[2])


SNIPPETS = [snippet for page in PAGES for snippet in snippets_of(page)]
README = {snippet.title: snippet.text for snippet in SNIPPETS if snippet.page == ROOT / "README.md"}


def in_language(*languages):
    chosen = [snippet for snippet in SNIPPETS if snippet.language in languages]
    return pytest.mark.parametrize("snippet", chosen, ids=lambda one: f"{one.page.name}:{one.line}")


def test_every_snippet_is_of_a_kind_that_is_tested():
    assert {snippet.language for snippet in SNIPPETS} <= {"yaml", "python", "sh", "mermaid"}


@in_language("yaml")
def test_yaml_loads(snippet, tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text(snippet.text, encoding="utf-8")
    keys = set(yaml.safe_load(snippet.text))
    assert keys <= set(Cluster.model_fields) or keys <= set(Recipe.model_fields)
    (load_cluster if keys <= set(Cluster.model_fields) else load_recipe)(path)


@in_language("python")
def test_python_compiles(snippet):
    compile(snippet.text, f"{snippet.page.name}:{snippet.line}", "exec")


@in_language("sh")
def test_commands_parse(snippet):
    words = [shlex.split(line, comments=True) for line in snippet.text.splitlines()]
    for program, *arguments in filter(None, words):
        inside = ["tfdist"] if program == "tfdist" else []
        if program == "docker" and "run" in arguments:  # what comes after the image is tfdist's
            inside = arguments[len(arguments) - 1 - arguments[::-1].index("tfdist") :]
            arguments = inside[1:]  # noqa: PLW2901 - the command inside
        if inside:
            load_command(arguments[0]).make_context(arguments[0], arguments[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, fragment in LINK.findall(page.read_text(encoding="utf-8")):
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), target
        if fragment:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert fragment[1:] in [re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings]


def test_the_readme_lists_every_command():
    table = re.findall(r"^\| `tfdist ([a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(table) == sorted(COMMANDS)


@pytest.fixture
def quickstart(tmp_path, monkeypatch):
    for name in ("my_model.py", "my_model.yaml", "cluster.yaml", "train.py"):
        (tmp_path / name).write_text(README[name], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_readmes_files_belong_together(quickstart):
    cluster, recipe = load_run(quickstart / "cluster.yaml")
    assert recipe is not None
    assert recipe.module == "my_model"
    assert len(cluster.tasks) == 4


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize(
    "command",
    [
        ["train.py"],
        ["-m", "tfdist_cli", "role", "--cluster", "one.yaml", "--task", "chief"],
    ],
    ids=["program", "recipe"],
)
def test_the_readmes_model_trains_in_one_process(quickstart, command):
    (quickstart / "one.yaml").write_text("strategy: single\nroles: {chief: {}}\nrecipe: my_model.yaml\n")
    done = subprocess.run([sys.executable, *command], cwd=quickstart, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "epoch 5/5" in done.stderr + done.stdout


def test_the_callbacks_of_the_documented_recipe_write_into_the_run_directory(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    monkeypatch.setenv("TFDIST_RUN_DIR", str(tmp_path))
    (text,) = (one.text for one in SNIPPETS if one.page.name == "recipe.md" and "def callbacks(" in one.text)
    module: dict[str, Any] = {}
    exec(compile(text, "recipe.md", "exec"), module)
    _, board = module["callbacks"]({})
    assert Path(board.log_dir) == tmp_path / "tensorboard"
