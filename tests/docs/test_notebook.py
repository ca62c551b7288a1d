"""The notebook: its cells run in order, as in Jupyter."""

import ast
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "tutorials" / "notebook.ipynb"


def code_cells():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_it_is_a_notebook_without_results():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert not [cell for cell in notebook["cells"] if cell.get("outputs") or cell.get("execution_count")]
    for source in code_cells():
        ast.parse(source)


@pytest.mark.rotates(5, 4)
@pytest.mark.cluster
@pytest.mark.slow
def test_its_cells_train_the_digits(tmp_path, monkeypatch, capsys):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    names = {}
    for source in code_cells():
        exec(compile(source, NOTEBOOK.name, "exec"), names)
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[:3]] == ["1", "2", "3"]
    assert names["view"].metrics["accuracy"] > 0.9
    assert names["again"].status().outcome.value == "done"
