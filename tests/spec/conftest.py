"""A folder with a cluster and a recipe."""

import pytest

CLUSTER = """\
strategy: parameter_server
roles:
  chief: {}
  ps: {replicas: 2}
  worker:
    replicas: 3
"""
RECIPE = """\
module: digits
params: {hidden: [500, 500], learning_rate: 1e-3}
train:
  epochs: 2
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, which holds cluster.yaml, recipes/recipe.yaml and recipes/digits.py."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "recipes" / "digits.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path
