"""The JSON Schema of cluster and recipe files, for editors: generated from the models, published in docs/schema."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode
from pydantic_core import core_schema

from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.model import VARIABLE_SCHEMA, SpecModel
from tfdist_cli.spec.sections.recipe import Recipe

MODELS: dict[str, type[SpecModel]] = {"cluster": Cluster, "recipe": Recipe}
"""The kinds of file, each with its model."""


def json_schema(kind: str) -> dict[str, Any]:
    """Returns the schema of a `cluster` or a `recipe` file.

    Raises:
        KeyError: there is no such kind.
    """
    schema = MODELS[kind].model_json_schema(schema_generator=_FileSchema)
    return {"$schema": _FileSchema.schema_dialect, **schema}


class _FileSchema(GenerateJsonSchema):
    """The schema of files, in which `${VAR}` may replace a number, a boolean or a choice."""

    def int_schema(self, schema: core_schema.IntSchema) -> dict[str, Any]:
        return {"anyOf": [super().int_schema(schema), VARIABLE_SCHEMA]}

    def float_schema(self, schema: core_schema.FloatSchema) -> dict[str, Any]:
        return {"anyOf": [super().float_schema(schema), VARIABLE_SCHEMA]}

    def bool_schema(self, schema: core_schema.BoolSchema) -> dict[str, Any]:
        return {"anyOf": [super().bool_schema(schema), VARIABLE_SCHEMA]}

    def literal_schema(self, schema: core_schema.LiteralSchema) -> dict[str, Any]:
        return {"anyOf": [super().literal_schema(schema), VARIABLE_SCHEMA]}

    def get_title_from_name(self, name: str) -> str:
        """Returns the key itself: it is its own title."""
        return name

    def generate(self, schema: core_schema.CoreSchema, mode: JsonSchemaMode = "validation") -> dict[str, Any]:
        made = super().generate(schema, mode)
        made["properties"].get("name", {}).pop("default", None)  # the default is the name of the file
        for part in (made, *made["$defs"].values()):
            if "description" in part:
                part["description"] = part["description"].partition("\n\n")[0]
        return made
