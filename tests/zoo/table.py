"""The results of the zoo in docs/reference/models.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.zoo.case import CASES
from tests.zoo.engines import ENGINES, FOR_EXAMPLES, FOR_MODELS, Result

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
MODELS = "<!-- results: python -m tests.zoo --page -->", "<!-- end of results -->"
EXAMPLES = "<!-- results: python -m tests.zoo --examples --page -->", "<!-- end of examples -->"


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
    lines += ["", *_head("model", FOR_MODELS)]
    for name, results in found.items():
        lines.append(f"| {name} | {' | '.join(results[key].state for key in FOR_MODELS)} |")
    return "\n".join([*lines, _all(found, FOR_MODELS)])


def examples_table(found: Mapping[str, Mapping[str, Result]]) -> str:
    """Returns a Markdown table of Keras's examples by engine, with the differences from Keras's training."""
    lines = _head("example", FOR_EXAMPLES)
    for name, results in found.items():
        page = CASES[name].example
        link = f"[{page}](https://keras.io/{'' if page.startswith('guides/') else 'examples/'}{page})"
        lines.append(f"| {link} | {' | '.join(_with_difference(results[key]) for key in FOR_EXAMPLES)} |")
    return "\n".join([*lines, _all(found, FOR_EXAMPLES)])


def _head(first: str, keys: Sequence[str]) -> list[str]:
    return [f"| {first} | {' | '.join(ENGINES[key].title for key in keys)} |", "|---" * (len(keys) + 1) + "|"]


def _all(found: Mapping[str, Mapping[str, Result]], keys: Sequence[str]) -> str:
    counts = [_counted([results[key].state for results in found.values()]) for key in keys]
    return f"| **all {len(found)}** | {' | '.join(counts)} |"


def _with_difference(result: Result) -> str:
    if result.state == "not run":
        return "-"
    if result.state == "ok":
        return f"ok {result.difference:.0e}"
    return f"{result.state} {result.difference:.1g}" if result.state in ("random", "close") else result.state


def _counted(states: Sequence[str]) -> str:
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))


def put(text: str, marks: tuple[str, str]) -> None:
    """Replaces a part of the page between two marks."""
    page = PAGE.read_text()
    head, _, rest = page.partition(marks[0])
    PAGE.write_text(f"{head}{marks[0]}\n{text}\n{marks[1]}{rest.partition(marks[1])[2]}")


def rows() -> dict[str, dict[str, str]]:
    """Returns the states on the page, by model and engine."""
    pages = {f"[{case.example}]": name for name, case in CASES.items() if case.example}
    found = {}
    for marks, keys in ((MODELS, FOR_MODELS), (EXAMPLES, FOR_EXAMPLES)):
        lines = PAGE.read_text().partition(marks[0])[2].partition(marks[1])[0].splitlines()
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        for name, *states in (row for row in cells if len(row) == len(keys) + 1):
            known = pages.get(name.partition("(")[0], name)
            found[known] = {key: state.partition(" ")[0] for key, state in zip(keys, states, strict=True)}
    return found
