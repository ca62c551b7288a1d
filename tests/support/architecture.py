"""The picture of the packages in docs/explanation/architecture.md, drawn from their imports.

`TFDIST_WRITE_DOCS=1 pytest tests/docs` updates it.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from tests.support.sources import syntax_tree

PACKAGE = Path(__file__).parents[2] / "tfdist_cli"
OPEN = ("launch", "spec", "train")
"""The packages whose own packages are drawn too."""


def packages(folder: Path) -> list[str]:
    """Returns the names of a folder's packages."""
    return sorted(path.parent.name for path in folder.glob("*/__init__.py"))


def imports(folder: Path) -> Iterator[str]:
    """Yields the full names that the modules of a folder import."""
    for path in sorted(folder.rglob("*.py")):
        yield from imports_of(path)


@cache
def imports_of(path: Path) -> list[str]:
    """Returns the full names that a module imports."""
    found: list[str] = []
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return found


def graph(folder: Path) -> dict[str, set[str]]:
    """Returns the packages of a folder, each with those that it imports."""
    names = packages(folder)
    prefix = ".".join(folder.relative_to(PACKAGE.parent).parts) + "."
    found: dict[str, set[str]] = {}
    for name in names:
        own = {each.removeprefix(prefix).split(".")[0] for each in imports(folder / name) if each.startswith(prefix)}
        found[name] = (own & set(names)) - {name}
    return found


def direct(edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Returns the arrows that do not follow from others: the transitive reduction of a graph without cycles."""

    def below(name: str) -> set[str]:
        return edges[name].union(*(below(each) for each in edges[name]))

    return {name: own - set().union(*(below(each) for each in own)) for name, own in edges.items()}


def arrows(edges: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """Returns the direct edges of a graph, sorted."""
    return sorted((one, other) for one, own in direct(edges).items() for other in own)


def picture() -> str:
    """Returns the packages and their imports as a Mermaid flowchart."""
    outer = graph(PACKAGE)
    lines = ["flowchart TD"]
    for name in outer:
        if name not in OPEN:
            lines.append(f"    {name}")
            continue
        inner = graph(PACKAGE / name)
        lines.append(f"    subgraph {name}")
        lines += [f"        {name}_{each}[{each}]" for each in inner]
        lines += [f"        {name}_{one} --> {name}_{other}" for one, other in arrows(inner)]
        lines.append("    end")
    lines += [f"    {one} --> {other}" for one, other in arrows(outer)]
    return "\n".join(lines) + "\n"
