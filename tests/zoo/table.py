"""The results of the zoo in docs/reference/models.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.zoo.engines import ENGINES, Result

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
BEGIN, END = "<!-- results: python -m tests.zoo --page -->", "<!-- end of results -->"


def table(
    found: Mapping[str, Mapping[str, Result]], classes: Mapping[str, Sequence[str]], excused: Sequence[str]
) -> str:
    """Returns two Markdown tables: classes by namespace, and models by engine.

    Args:
        found: the results by model and engine.
        classes: the models that contain each Keras class.
        excused: the classes that no model contains.
    """
    lines = ["| Keras | public classes | in a model | in none |", "|---|---|---|---|"]
    for namespace in dict.fromkeys(name.rpartition(".")[0] for name in classes):
        own = [name for name in classes if name.rpartition(".")[0] == namespace]
        none = [f"`{name.rpartition('.')[2]}`" for name in own if name in excused]
        lines.append(f"| `keras.{namespace}` | {len(own)} | {len(own) - len(none)} | {', '.join(none)} |")
    lines += ["", f"| model | {' | '.join(engine.title for engine in ENGINES.values())} |", "|---" * 6 + "|"]
    for name, results in found.items():
        lines.append(f"| {name} | {' | '.join(results[key].state for key in ENGINES)} |")
    counts = [_counted([results[key].state for results in found.values()]) for key in ENGINES]
    lines.append(f"| **all {len(found)}** | {' | '.join(counts)} |")
    return "\n".join(lines)


def _counted(states: Sequence[str]) -> str:
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))


def put(text: str) -> None:
    """Replaces the tables of the page."""
    page = PAGE.read_text()
    head, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


def rows() -> dict[str, dict[str, str]]:
    """Returns the states on the page, by model and engine."""
    lines = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: dict(zip(ENGINES, states, strict=True)) for name, *states in cells if len(states) == len(ENGINES)}
