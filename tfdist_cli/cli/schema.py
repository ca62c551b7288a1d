"""`tfdist schema`: prints the JSON Schemas, with which editors complete and check the files."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated

import typer

from tfdist_cli.cli.console import console
from tfdist_cli.spec.schema import json_schema

EXAMPLES = ("tfdist schema cluster > cluster.schema.json",)


class Kind(str, Enum):
    """The kinds of files that users write."""

    cluster = "cluster"
    recipe = "recipe"


def schema(kind: Annotated[Kind, typer.Argument(help="The kind of file.", show_default=False)]) -> None:
    """Print the JSON Schema of the cluster file or the recipe file, for editors.

    Editors with a YAML language server read the schema's path from the first line of a file:
    # yaml-language-server: $schema=cluster.schema.json
    """
    console.write(json.dumps(json_schema(kind.value), indent=2))
