"""`tfdist schema`: what an editor needs to complete and check the files."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated

import typer

from tfdist_cli.cli.console import console
from tfdist_cli.spec.schema import json_schema

EXAMPLES = ("tfdist schema cluster > cluster.schema.json",)


class Kind(str, Enum):
    """The kinds of file."""

    cluster = "cluster"
    recipe = "recipe"


def schema(kind: Annotated[Kind, typer.Argument(help="Which of the two files.", show_default=False)]) -> None:
    """Print the JSON Schema of a cluster or a recipe file, for editors.

    An editor with a YAML language server takes it from the file's first line:
    # yaml-language-server: $schema=cluster.schema.json
    """
    console.write(json.dumps(json_schema(kind.value), indent=2))
