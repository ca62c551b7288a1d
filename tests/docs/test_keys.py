"""The tables of keys in docs/ are made from the models: `TFDIST_WRITE_DOCS=1 pytest tests/docs` writes them anew."""

import json
import os
import re
from pathlib import Path

import pytest

from tfdist_cli.spec.sections import cluster, compose, kubernetes, recipe, slurm, ssh
from tfdist_cli.spec.sections.model import SpecModel

DOCS = Path(__file__).parents[2] / "docs"
MARKER = re.compile(r"<!-- keys of (\w+) -->\n(?:\n?(?:\|.*\n)+)?")
PAGES = {
    "cluster.md": cluster,
    "recipe.md": recipe,
    "ssh.md": ssh,
    "slurm.md": slurm,
    "containers.md": compose,
    "kubernetes.md": kubernetes,
}
each_page = pytest.mark.parametrize(("name", "module"), PAGES.items())


def default_of(field):
    if field.is_required():
        return "required"
    if isinstance(field.default, SpecModel):
        return "see below"
    return "" if field.default is None else f"`{json.dumps(field.default)}`"


def table(model):
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        assert meaning, f"{model.__name__}.{name} has no docstring"
        rows.append(f"| `{name}` | {default_of(field)} | {meaning} |")
    return "\n".join(rows) + "\n"


def written_anew(page, module):
    return MARKER.sub(lambda match: f"<!-- keys of {match[1]} -->\n\n{table(getattr(module, match[1]))}", page)


@each_page
def test_the_tables_are_those_of_the_models(name, module):
    path = DOCS / name
    page = path.read_text(encoding="utf-8")
    if os.environ.get("TFDIST_WRITE_DOCS") == "1":
        path.write_text(page := written_anew(page, module), encoding="utf-8")
    assert page == written_anew(page, module)


@each_page
def test_every_model_has_its_table(name, module):
    page = (DOCS / name).read_text(encoding="utf-8")
    models = {
        value.__name__
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, SpecModel) and value.__module__ == module.__name__
    }
    assert set(MARKER.findall(page)) >= models
