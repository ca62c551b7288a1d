"""The report of `tfdist check`'s process: JSON lines, written as soon as something is known, so that a crash leaves it.

Each line is an object with one key: `stage`, what the process does from now on; `finding`; or `facts`, a section and
its values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tfdist_cli.finding import Finding

CLUSTER, RECIPE, REPORT, OUTPUT = "cluster.yaml", "recipe.yaml", "report.jsonl", "output.log"
"""Files of the folder that the process is started with: what it reads, what it writes, and its output."""


@dataclass(frozen=True)
class Report:
    """What the process has found.

    Args:
        stage: what it did last.
        findings: the problems.
        facts: values by section, such as `facts["model"]["weights_bytes"]`.
    """

    stage: str = "starting Python"
    findings: tuple[Finding, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


class ReportWriter:
    """Writes a report.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def stage(self, name: str) -> None:
        """Reports what the process does from now on."""
        self._write("stage", name)

    def finding(self, finding: Finding) -> None:
        """Reports a problem."""
        self._write("finding", asdict(finding))

    def facts(self, section: str, **values: Any) -> None:
        """Reports values of a section."""
        self._write("facts", {section: values})

    def _write(self, kind: str, value: Any) -> None:
        self._file.write(json.dumps({kind: value}) + "\n")


def read_report(path: Path) -> Report:
    """Returns the report as far as it is written: the last line may be cut off."""
    stage, findings = Report().stage, list[Finding]()
    facts: dict[str, Any] = {}
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for line in text.split("\n")[:-1]:
        written = json.loads(line)
        stage = written.get("stage", stage)
        findings += [Finding(**written["finding"])] if "finding" in written else []
        facts |= written.get("facts", {})
    return Report(stage, tuple(findings), facts)
