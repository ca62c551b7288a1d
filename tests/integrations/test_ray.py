"""Trainings on datasets of Ray: what is refused before anything starts, and what the launcher is asked for."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import tfdist_cli as tfdist
from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.integrations import training
from tfdist_cli.storage.listing import matches

pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'tfdist-cli[parquet]'")
from pyarrow import parquet  # noqa: E402 it is an extra


class Dataset:
    """A dataset of Ray with two columns."""

    def __init__(self, columns=("a", "y", "other"), rows=True):
        self.names, self.shuffled, self.rows = list(columns), False, rows

    def columns(self):
        return self.names

    def select_columns(self, names):
        return Dataset(names, self.rows)

    def random_shuffle(self):
        self.shuffled = True
        return self

    def write_parquet(self, folder):
        if not self.rows:
            return
        table = pyarrow.table({**{name: [1.0, 2.0] for name in self.names}, "shuffled": [self.shuffled] * 2})
        (parent := Path(folder)).mkdir(parents=True)
        parquet.write_table(table, parent / "0.parquet")


@pytest.fixture(autouse=True)
def ray(monkeypatch):
    """A Ray that the program uses."""
    context = SimpleNamespace(gcs_address="10.0.0.1:6379")
    module = SimpleNamespace(
        __spec__=SimpleNamespace(), is_initialized=lambda: True, get_runtime_context=lambda: context
    )
    monkeypatch.setitem(sys.modules, "ray", module)
    return module


@pytest.fixture
def run(monkeypatch):
    """What is run in place of the launcher."""
    found = {}

    def run(self, folder, data, max_restarts):
        (file,) = matches(data["train"])
        rows = parquet.read_table(file)
        found.update(
            cluster=self.cluster("c"), data=data, columns=rows.column_names, shuffled=rows["shuffled"][0].as_py()
        )

    monkeypatch.setattr(training.TableTraining, "run", run)
    return found


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_columns_are_written_and_trained_on(run, tmp_path, shuffle):
    tfdist.ray.fit("m:f", Dataset(), features=["a"], label="y", store=tmp_path, shuffle=shuffle, workers=3)
    assert run["columns"] == ["a", "y", "shuffled"]
    assert run["shuffled"] is shuffle
    assert run["cluster"]["ray"] == {"address": "10.0.0.1:6379"}
    assert run["cluster"]["roles"] == {"worker": {"replicas": 3, "cpus": 1}}
    assert not list(tmp_path.iterdir())  # no run, and the copies are removed


def test_a_folder_is_read_where_it_is(run, ray, tmp_path):
    ray.is_initialized = lambda: False
    Dataset(["a", "y"]).write_parquet(tmp_path / "rows")
    tfdist.ray.fit("m:f", tmp_path / "rows", features=["a"], label="y", store=tmp_path / "store")
    assert run["data"] == {"train": str(tmp_path / "rows" / "*.parquet")}
    assert run["cluster"]["ray"] == {"address": "auto"}


@pytest.mark.parametrize(
    ("table", "features", "code"),
    [
        ([1, 2], ["a"], "not-a-dataset"),
        (Dataset(), ["b"], "no-such-column"),
        (Dataset(()), ["a"], "no-rows"),
        (Dataset(rows=False), ["a"], "no-rows"),
        (Dataset(), "a", "invalid-features"),
        ("/nowhere", ["a"], "no-such-file"),
    ],
)
def test_tables_that_are_refused(tmp_path, table, features, code):
    with raises(UsageError, code):
        tfdist.ray.fit("m:f", table, features=features, label="y", store=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def client(monkeypatch):
    """The program uses Ray Client."""
    client = SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: True))
    monkeypatch.setitem(sys.modules, "ray.util.client", client)


def test_ray_client_reads_folders_of_the_cluster_that_is_named(client, run, tmp_path):
    Dataset(["a", "y"]).write_parquet(tmp_path / "rows")
    arguments = {"features": ["a"], "label": "y", "store": tmp_path / "store"}
    with raises(UsageError, "ray-client-address"):
        tfdist.ray.fit("m:f", tmp_path / "rows", **arguments)
    tfdist.ray.fit("m:f", tmp_path / "rows", address="ray://h:1", **arguments)
    assert run["cluster"]["ray"] == {"address": "ray://h:1"}


def test_ray_client_computes_no_dataset(client, tmp_path):
    with raises(UsageError, "ray-client-dataset"):
        tfdist.ray.fit("m:f", Dataset(), features=["a"], label="y", store=tmp_path, address="ray://h:1")
    assert not list(tmp_path.iterdir())


def test_without_ray(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(UsageError, "package-missing"):
        tfdist.ray.fit("m:f", Dataset(), features=["a"], label="y", store=tmp_path)
