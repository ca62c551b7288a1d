"""Prints findings of `tfdist doctor` and `tfdist check`: each with its level, code, place and fix."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from tfdist_cli.cli.console import console
from tfdist_cli.cli.console.lines import neutral
from tfdist_cli.finding import Finding

_COLOURS = {"error": "bold red", "warning": "bold yellow"}


def print_findings(found: Sequence[Finding]) -> None:
    """Prints each finding and its fix on stdout, then how many there are."""
    for finding in found:
        line = Text.assemble((finding.level, _COLOURS[finding.level]), f" [{finding.code}] {neutral(finding.place)}: ")
        console.out.print(line + Text(neutral(finding.message)))
        console.out.print(Text(f"  fix: {neutral(finding.fix)}"))
    errors = sum(finding.level == "error" for finding in found)
    warnings = len(found) - errors
    summary = f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}"
    console.out.print(Text(summary if found else "no problems found", style="bold" if found else "bold green"))
