"""The published JSON Schemas are the models', and fit what ships."""

import json
import re
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from tfdist_cli.spec.loading.positions import read_yaml
from tfdist_cli.spec.schema import MODELS, json_schema

ROOT = Path(__file__).parents[2]
SHIPPED = [("cluster", path) for path in sorted(ROOT.glob("configs/*.yaml"))] + [
    ("recipe", path) for path in sorted(ROOT.glob("recipes/*.yaml"))
]


@pytest.mark.parametrize("kind", MODELS)
def test_the_published_schema_is_up_to_date(kind):
    published = ROOT / "docs" / "schema" / f"{kind}.schema.json"
    assert json.loads(published.read_text()) == json_schema(kind), (
        f"tfdist schema {kind} > {published.relative_to(ROOT)}"
    )


@pytest.mark.parametrize("kind", MODELS)
def test_it_is_a_schema_that_explains_every_key(kind):
    schema = json_schema(kind)
    Draft202012Validator.check_schema(schema)
    for part in (schema, *(part for part in schema["$defs"].values() if part)):
        assert part["description"].count("\n\n") == 0
        assert part["additionalProperties"] is False
        for key, value in part["properties"].items():
            assert value["description"], key


@pytest.mark.parametrize(("kind", "path"), SHIPPED, ids=lambda value: getattr(value, "name", value))
def test_shipped_files_fit(kind, path):
    Draft202012Validator(json_schema(kind)).validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    ("kind", "text", "fits"),
    [
        ("cluster", "{strategy: single, roles: {chief: {}}}", True),
        ("cluster", "{strategy: single, roles: {chief: null}, recipe: a}", True),
        ("cluster", "{strategy: '${S:-single}', roles: {worker: {replicas: '${N}'}}}", True),
        ("cluster", "{strategy: single, roles: {worker: {replicas: '${N'}}}", False),
        ("cluster", "{strategy: other, roles: {}}", False),
        ("cluster", "{strategy: single, roles: {chief: {replica: 1}}}", False),
        ("cluster", "{strategy: single}", False),
        ("recipe", "{module: a, params: {b: [1, {c: null}]}, evaluate: null, train: {repeat: '${R:-true}'}}", True),
        ("recipe", "{module: a, train: {epochs: 0}}", False),
        ("recipe", "{module: a, train: {repeat: 'yes'}}", False),
    ],
)
def test_fits(kind, text, fits):
    assert Draft202012Validator(json_schema(kind)).is_valid(yaml.safe_load(text)) is fits


@pytest.mark.parametrize("kind", MODELS)
def test_maps_in_descriptions_can_be_written_into_a_file(kind):
    maps = [json.loads(f'"{found}"') for found in re.findall(r"`(\{[^`]+\})`", json.dumps(json_schema(kind)))]
    assert maps
    assert [(each, problem) for each in maps for problem in read_yaml(f"key: {each}", "f", {}).problems()] == []
