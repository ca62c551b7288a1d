"""Key tables in docs/reference are generated from the models: `TFDIST_WRITE_DOCS=1 pytest tests/docs` updates them."""

import json
import os
import re
from pathlib import Path

import pytest

from tfdist_cli.spec.sections import cluster, compose, engines, kubernetes, recipe, role_spec, slurm, ssh
from tfdist_cli.spec.sections.model import SpecModel, descriptions

DOCS = Path(__file__).parents[2] / "docs" / "reference"
MARKER = re.compile(r"<!-- keys of (\w+) -->\n(?:\n?(?:\|.*\n)+)?")
PAGES = {"cluster.md": (cluster, role_spec, ssh, slurm, compose, kubernetes, engines), "recipe.md": (recipe,)}
each_page = pytest.mark.parametrize(("name", "modules"), PAGES.items())


def default_of(field):
    if field.is_required():
        return "required"
    if isinstance(field.default, SpecModel):
        return "see below"
    return "" if field.default is None else f"`{json.dumps(field.default)}`"


def table(model):
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        meaning = " ".join(descriptions(model).get(name, "").split()).replace("|", "\\|")
        assert meaning, f"{model.__name__}.{name} has no docstring"
        rows.append(f"| `{name}` | {default_of(field)} | {meaning} |")
    return "\n".join(rows) + "\n"


def models_of(modules):
    """The sections by name: those that the modules define, and those that they import from others."""
    return {
        name: value
        for module in reversed(modules)
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, SpecModel)
    }


def updated(page, modules):
    models = models_of(modules)
    return MARKER.sub(lambda match: f"<!-- keys of {match[1]} -->\n\n{table(models[match[1]])}", page)


@each_page
def test_the_tables_match_the_models(name, modules):
    path = DOCS / name
    page = path.read_text(encoding="utf-8")
    if os.environ.get("TFDIST_WRITE_DOCS") == "1":
        path.write_text(page := updated(page, modules), encoding="utf-8")
    assert page == updated(page, modules)


@each_page
def test_every_model_has_its_table(name, modules):
    page = (DOCS / name).read_text(encoding="utf-8")
    defined = {module.__name__ for module in modules}
    models = {key for key, value in models_of(modules).items() if value.__module__ in defined}
    assert set(MARKER.findall(page)) >= models
