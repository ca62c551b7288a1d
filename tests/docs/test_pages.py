"""Each page is of one kind and in the index; the codes in the troubleshooting guide exist."""

import re
from itertools import groupby
from pathlib import Path

from tests.support.messages import messages

DOCS = Path(__file__).parents[2] / "docs"
KINDS = {"tutorials", "how-to", "reference", "explanation"}
GENERATED = {"reference/messages.md"}
"""Pages that the index names without a link."""
CODES = re.compile(r"`([a-z0-9]+(?:-[a-z0-9]+)+)`")


def test_each_page_is_of_one_kind():
    folders = {path.relative_to(DOCS).parts[0] for path in DOCS.rglob("*.md")}
    assert folders == KINDS | {"README.md"}


def test_the_index_lists_each_page_once_under_its_kind():
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\(([\w/-]+\.md)\)", index)
    pages = {str(path.relative_to(DOCS)) for kind in KINDS for path in (DOCS / kind).glob("*.md")}
    assert sorted(linked) == sorted(pages - GENERATED)
    kinds = [kind for kind, _ in groupby(path.split("/")[0] for path in linked)]
    assert kinds == ["tutorials", "how-to", "reference", "explanation"]


def test_each_page_has_a_title():
    titles = [path.read_text(encoding="utf-8").partition("\n")[0] for path in DOCS.rglob("*.md")]
    assert all(title.startswith("# ") for title in titles)
    assert len(set(titles)) == len(titles)


def test_the_troubleshooting_guide_names_codes_that_exist():
    page = (DOCS / "how-to" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page.partition("## Files and arguments")[2], re.MULTILINE)
    named = [code for row in rows for code in CODES.findall(row)]
    assert len(set(named)) == len(named)
    assert not set(named) - {message.code for message in messages()}
