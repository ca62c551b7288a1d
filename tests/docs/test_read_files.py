"""The snippets of docs/how-to/read-files.md read files: two shards have each row once."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.numbered_files import numbered_files
from tfdist_cli.train.data.inputs import Inputs
from tfdist_cli.train.data.shard import Shard

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "read-files.md").read_text()
SNIPPETS = re.findall(r"^## (.+?)$|^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def snippets():
    """Yields the heading and the code of each snippet."""
    heading = ""
    for title, code in SNIPPETS:
        heading = title or heading
        if code:
            yield pytest.param(heading, code, id=heading)


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize(("heading", "code"), snippets())
def test_each_row_is_read_by_one_worker(heading, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = numbered_files(heading, tmp_path / "data")
    names: dict = {}
    exec(code, names)
    function = names.get("dataset") or Inputs.of(names["data"]).dataset_function(None, shuffle=False)
    found = []
    for index in range(2):
        labels = [int(label) for _, y in function(Shard(index, 2, index)) for label in np.ravel(y)]
        assert labels
        found += labels
    assert sorted(found) == sorted(rows)
