"""The picture of the packages is up to date, and the modules, packages and make targets that pages name exist."""

import os
import re
from pathlib import Path

import pytest

from tests.support.architecture import PACKAGE as TFDIST
from tests.support.architecture import direct, graph, picture

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
PICTURE = re.compile(r"(?<=```mermaid\n).*?(?=```)", re.DOTALL)
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]
PATHS = re.compile(r"`((?:tfdist_cli|tests|benchmarks|docs|configs|recipes)/[\w./-]*)`")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def test_the_picture_is_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    if os.environ.get("TFDIST_WRITE_DOCS") == "1":
        PAGE.write_text(page := PICTURE.sub(picture(), page), encoding="utf-8")
    assert PICTURE.findall(page) == [picture()], "TFDIST_WRITE_DOCS=1 pytest tests/docs updates it"


def test_arrows_that_follow_from_others_are_left_out():
    edges = {"a": {"b", "c", "d"}, "b": {"c"}, "c": set(), "d": set()}
    assert direct(edges) == {"a": {"b", "d"}, "b": {"c"}, "c": set(), "d": set()}


def test_the_graph_has_the_imports_of_a_package():
    assert {"spec", "protocol"} <= graph(TFDIST)["plan"]
    assert "tf_compat" in graph(TFDIST / "train")["variables"]


@pytest.mark.parametrize("folder", [TFDIST, TFDIST / "train"], ids=["tfdist", "train"])
def test_the_table_has_each_package(folder):
    packages = {path.parent.relative_to(ROOT) for path in folder.glob("*/__init__.py")}
    rows = re.findall(r"^\| `([\w/]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {str(package) for package in packages} <= set(rows)


@each_page
def test_paths_exist(page):
    for path in PATHS.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists(), path


@each_page
def test_make_has_the_targets_that_pages_name(page):
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"(?:`|^)make ([a-z]+)", page.read_text(encoding="utf-8"), re.MULTILINE)) <= set(targets)
