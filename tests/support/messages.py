"""The messages in the source, as a Markdown table: what tests pin of the wording, once.

`python -m tests.support.messages` writes docs/reference/messages.md.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.sources import syntax_tree

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tfdist_cli"
PAGE = ROOT / "docs" / "reference" / "messages.md"
HEAD = """# Messages

Every problem that tfdist reports has a code. The code stays the same when the wording changes. A message is printed as
`error[code]: message`; `…` stands for a value. [Troubleshooting](../how-to/troubleshooting.md) explains causes and
fixes. This page is generated from the source by `python -m tests.support.messages`.

| code | message | hint |
|---|---|---|
"""


@dataclass(frozen=True, order=True)
class Message:
    """One problem as the source words it.

    Args:
        code: its stable name.
        message: the text; `…` for each value. Empty where the code does not write it as a literal.
        hint: what to do about it, likewise.
        place: file and line.
    """

    code: str
    message: str
    hint: str
    place: str


Variables = dict[str, ast.expr]
"""The variables of a module that hold a message or a hint, each with its last value above the call that uses it."""


def template(node: ast.AST | None, variables: Variables) -> str:
    """The text of a string expression, with `…` for each value."""
    if isinstance(node, ast.Name) and node.id in variables:
        return template(variables[node.id], {})
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part, variables) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left, variables) + template(node.right, variables)
    return "…" if node is not None else ""


@cache
def messages() -> tuple[Message, ...]:
    """Every call in the package that names a code."""
    return tuple(_read_messages())


def _read_messages() -> Iterator[Message]:
    for path in sorted(PACKAGE.rglob("*.py")):
        nodes = [node for node in ast.walk(syntax_tree(path)) if isinstance(node, ast.Assign | ast.Call)]
        variables: Variables = {}
        for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
            if isinstance(node, ast.Assign):
                variables |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
                continue
            named = {keyword.arg: keyword.value for keyword in node.keywords}
            code = named.get("code")
            if isinstance(code, ast.Constant) and isinstance(code.value, str) and code.value:
                texts = [template(arg, variables) for arg in node.args]
                text = template(named.get("message"), variables) or max(texts, key=len, default="")
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                yield Message(code.value, text, template(named.get("hint") or named.get("fix"), variables), place)


def page() -> str:
    """docs/reference/messages.md as it should be."""
    rows = sorted({(each.code, each.message, each.hint) for each in messages()})
    cells = (" | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows)
    return HEAD + "".join(f"| {row} |\n" for row in cells)


if __name__ == "__main__":
    PAGE.write_text(page())
