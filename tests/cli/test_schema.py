"""`tfdist schema`."""

import json

import pytest

from tfdist_cli.spec.schema import json_schema


@pytest.mark.parametrize("kind", ["cluster", "recipe"])
def test_prints_the_schema(tfdist, kind):
    assert json.loads(tfdist("schema", kind).out) == json_schema(kind)
