"""`tfdist predict` writes each example's prediction once, in order, whatever the files are."""

import csv
import importlib
import sys
import uuid
from pathlib import Path

import keras
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

import tfdist_cli as api
from tests.cli.conftest import tfdist  # noqa: F401 a fixture
from tests.support.codes import codes_in, raises
from tfdist_cli.errors import UsageError
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.storage.remote import RemoteFolder
from tfdist_cli.task.prediction.inputs import READERS, Reading, bound, read
from tfdist_cli.task.prediction.job import PredictionJob, Shard, model_of
from tfdist_cli.task.prediction.outputs import FORMATS, seal
from tfdist_cli.train.cluster import join
from tfdist_cli.train.trainer.config.checkpoints import Checkpoints

PART = ("--part-size", 10, "--batch-size", 4)


@pytest.fixture(autouse=True)
def _own_module():
    yield
    sys.modules.pop("own_recipe", None)


def write(path, x):
    if path.suffix == ".npy":
        np.save(path, x)
    elif path.suffix == ".npz":
        np.savez(path, x=x)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([["a", "b", "c"], *x.tolist()])
    else:
        parquet.write_table(pyarrow.table({name: x[:, n] for n, name in enumerate("abc")}), path, row_group_size=7)


def predictions(path):
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".csv":
        rows = list(csv.reader(path.open()))
        assert rows[0] == ["prediction_0", "prediction_1"]
        return np.array(rows[1:], np.float32)
    return np.stack(parquet.read_table(path)["prediction"].to_numpy())


FILES = [("d.npy", "o.csv"), ("d.npz", "o.npy"), ("d.csv", "o.parquet"), ("d.parquet", "o.npy")]


@pytest.mark.parametrize(("data", "output"), FILES)
def test_predictions_are_keras_s_in_the_order_of_the_file(data, output, run, x, tfdist, tmp_path):  # noqa: F811
    folder, model = run
    write(tmp_path / data, x)
    ended = tfdist("predict", folder, "--data", data, "--output", output, *PART)
    assert (ended.code, ended.out.strip()) == (0, output), ended.err
    np.testing.assert_allclose(predictions(Path(output)), model.predict(x, verbose=0), rtol=1e-4, atol=1e-6)
    assert not Path(f"{output}.parts").exists()
    assert codes_in(tfdist("predict", folder, "--data", data, "--output", output).err) == ["output-exists"]


def test_shards_predict_their_parts_and_a_last_call_joins_them(run, x, tfdist, tmp_path):  # noqa: F811
    folder, model = run
    write(tmp_path / "d.csv", x)
    call = ("predict", folder, "--data", "d.csv", "--output", "o.npy", *PART)
    assert tfdist(*call, "--shard", "1/3").code == 0
    job = PredictionJob(folder / "export" / "model.keras", None, "d.csv", (), Path("o.npy"), 10)
    assert (job.done(), job.parts) == ({1, 4, 7, 10}, 11)
    kept = {part: job.path_of(part).stat().st_mtime_ns for part in job.done()}
    (job.folder / ".writing-1-part-000000.npy").write_bytes(b"half")
    assert tfdist(*call, "--shard", "0/3").code == 0
    assert {part: job.path_of(part).stat().st_mtime_ns for part in kept} == kept
    assert codes_in(tfdist(*call[:-4], "--part-size", 5).err) == ["other-predictions"]
    assert tfdist(*call).code == 0
    np.testing.assert_allclose(np.load("o.npy"), model.predict(x, verbose=0), rtol=1e-4, atol=1e-6)


def test_a_split_of_the_recipe_is_predicted(run, tfdist):  # noqa: F811
    folder, model = run
    assert tfdist("predict", folder, "--data", "test", "--output", "o.npy", *PART).code == 0
    expected = model.predict(sys.modules["own_recipe"].X, verbose=0)
    np.testing.assert_allclose(np.load("o.npy"), expected, rtol=1e-4, atol=1e-6)
    ended = tfdist("predict", folder, "--data", "shuffled", "--output", "s.npy")
    assert codes_in(ended.err) == ["prediction-data-shuffled"]


@pytest.mark.slow
def test_an_export_as_saved_model_predicts_as_its_model(run, x, tfdist, tmp_path):  # noqa: F811
    folder, model = run
    model.export(folder / "export" / "saved_model", verbose=False)
    write(tmp_path / "d.npy", x)
    assert tfdist("predict", folder, "--data", "d.npy", "--output", "o.npy", *PART).code == 0
    np.testing.assert_allclose(np.load("o.npy"), model.predict(x, verbose=0), rtol=1e-4, atol=1e-6)


def test_an_export_as_saved_model_has_its_own_names(run, tfdist, tmp_path):  # noqa: F811
    folder, _ = run
    first, second = keras.Input((1,), name="first"), keras.Input((2,), name="second")
    model = keras.Model(
        {"first": first, "second": second}, {"sum": keras.layers.Add()([first, second]), "first": first}
    )
    model.export(folder / "export" / "saved_model", verbose=False)
    (tmp_path / "d.csv").write_text("second_0,first,second_1\n1,10,2\n3,20,4\n")
    assert tfdist("predict", folder, "--data", "d.csv", "--output", "o.csv").code == 0
    assert Path("o.csv").read_text().split() == ["first,sum_0,sum_1", "10.0,11.0,12.0", "20.0,23.0,24.0"]


@pytest.mark.slow
def test_a_checkpoint_predicts_as_the_model_that_was_saved(run, x, tfdist, tmp_path, monkeypatch):  # noqa: F811
    folder, _ = run
    monkeypatch.syspath_prepend(str(folder))
    recipe = importlib.import_module("own_recipe")
    model = recipe.model({})
    monkeypatch.setattr(join, "_joined", None)
    kept = api.Checkpoints(folder / "checkpoints", every_steps=3)
    api.fit(model, recipe.dataset({}, "train", api.Shard()).batch(10), max_steps=3, checkpoints=kept)
    expected = model.predict(x, verbose=0)
    write(tmp_path / "d.npy", x)
    assert tfdist("predict", folder, "--data", "d.npy", "--output", "o.npy", "--step", 3).code == 0
    np.testing.assert_allclose(np.load("o.npy"), expected, rtol=1e-4, atol=1e-6)
    assert "step-" in tfdist("predict", folder, "--data", "d.npy", "--output", "p.npy", "--dry-run").out


def test_a_dry_run_predicts_nothing(run, tfdist):  # noqa: F811
    ended = tfdist("predict", run[0], "--data", "test", "--output", "o.csv", "--dry-run")
    assert ended.code == 0
    assert "model.keras" in ended.out
    assert not Path("o.csv.parts").exists()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--data", "none.csv", "--output", "o.csv"), "no-data-file"),
        (("--data", "d.txt.csv.npy.csv", "--output", "o.txt"), "unknown-output-format"),
        (("--data", "d.csv", "--output", "o.csv", "--columns", "a,z"), "no-such-column"),
        (("--data", "d.csv", "--output", "o.csv", "--columns", "a"), "input-shape-differs"),
        (("--data", "d.csv", "--output", "o.csv", "--shard", "2/2"), "invalid-shard"),
        (("--data", "d.csv", "--output", "o.csv", "--step", 5), "checkpoint-not-found"),
    ],
)
def test_mistakes_are_named(arguments, code, run, x, tfdist, tmp_path):  # noqa: F811
    write(tmp_path / "d.csv", x)
    assert codes_in(tfdist("predict", run[0], *arguments).err) == [code]


@pytest.mark.parametrize(
    ("text", "code", "place"),
    [
        ("a,b,c\n1,2,3\n1,2\n", "row-incomplete", "d.csv:3"),
        ("a,b,c\n\n1,2,3\n", "row-incomplete", "d.csv:2"),
        ('a,b,c\n"1\n",2,3\n1,many,2\n', "value-does-not-fit", "d.csv:4"),
        ("a,b,c\n1,2,\n", "value-does-not-fit", "d.csv:2"),
    ],
)
def test_a_wrong_row_of_a_csv_file_is_named(text, code, place, run, tfdist, tmp_path):  # noqa: F811
    (tmp_path / "d.csv").write_text(text)
    ended = tfdist("predict", run[0], "--data", "d.csv", "--output", "o.csv")
    assert codes_in(ended.err) == [code]
    assert place in ended.err


def test_a_row_of_a_csv_file_may_lack_a_column_that_is_no_input(tmp_path):
    (tmp_path / "d.csv").write_text("a,b\n1\n2,3\n")
    ((_, arrays),) = read(tmp_path / "d.csv", Reading(9, lambda _: True, ("a",)), print)
    assert list(arrays["a"]) == ["1", "2"]


def test_empty_lines_at_the_end_of_a_csv_file_are_no_examples(tmp_path):
    rows = []
    (tmp_path / "d.csv").write_text("a\n1\n2\n\n\n")
    for shard in (Shard(0, 2), Shard(1, 2)):
        list(read(tmp_path / "d.csv", Reading(2, shard.takes), rows.append))
    assert rows == [2, 2]


@pytest.mark.parametrize("form", ["keras", "saved_model"])
def test_an_id_that_an_embedding_lacks_is_named(form, run, tfdist, tmp_path):  # noqa: F811
    folder, _ = run
    first, second = (keras.Input((), dtype="int32", name=name) for name in "ab")
    tables = [keras.layers.Embedding(rows, 4, name=name) for rows, name in ((30, "table"), (20, "table_1"))]
    model = keras.Model([first, second], keras.layers.Add()([tables[0](first), tables[1](second)]))
    model.save(folder / "export" / "model.keras")
    if form == "saved_model":
        model.export(folder / "export" / "saved_model", verbose=False)
    for ids, words in (("5000,1", {"5000", "'table'"}), ("-31,1", {"-31", "'table'"}), ("1.0,20", {"20", "'table_1'"})):
        (tmp_path / "d.csv").write_text(f"a,b\n1,2\n{ids}\n")
        ended = tfdist("predict", folder, "--data", "d.csv", "--output", f"{ids}.npy")
        assert codes_in(ended.err) == ["id-out-of-range"]
        assert words <= set(ended.err.replace(",", " ").split())


def test_the_newest_form_of_the_model_is_used(tmp_path):
    for saves in (False, True):
        with raises(UsageError, "no-model-in-run") as caught:
            model_of(tmp_path, tmp_path / "checkpoints", None, saves=saves)
        assert ("every_seconds" in str(caught.value.hint)) != saves, "it has this already"
    export = tmp_path / "export" / "saved_model"
    older, newer = (tmp_path / "checkpoints" / f"step-{step:08}" for step in (5, 30))
    for path in (older, newer, export):
        path.mkdir(parents=True)
    assert model_of(tmp_path, older.parent, None) == (export, None)
    assert model_of(tmp_path, older.parent, 5) == (older, 5)
    export.rmdir()
    (tmp_path / "export").rmdir()
    assert model_of(tmp_path, older.parent, None) == (newer, 30)


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    def fail(path):
        path.write_text("half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        seal(tmp_path / "part", fail)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("suffix", sorted(READERS))
def test_readers_count_examples_and_skip_parts(suffix, stored, x, tmp_path):
    path, rows = tmp_path / f"d{suffix}", []
    write(path, x)
    at = Url(f"memory://{uuid.uuid4()}") / path.name if stored else path
    if stored:
        RemoteFolder(at.parent).upload(path, at.name)
    found = dict(read(at, Reading(20, Shard(1, 2).takes), rows.append))
    assert rows == [107]
    for part, arrays in found.items():
        given = bound(arrays, {"x": ((3,), np.float32)})["x"]
        np.testing.assert_allclose(given, x[part * 20 : part * 20 + 20], rtol=1e-6)
    assert list(found) == [1, 3, 5]


def test_an_array_in_a_storage_service_is_stored_by_rows(tmp_path):
    folder = RemoteFolder(Url(f"memory://{uuid.uuid4()}"))
    np.save(tmp_path / "x.npy", np.ones((3, 2)).T)
    folder.upload(tmp_path / "x.npy", "x.npy")
    with raises(UsageError, "unknown-data-file"):
        list(read(folder.url / "x.npy", Reading(2, lambda _: True), print))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.csv", "Größe,b\n1,2\n".encode("latin-1")),
        ("x.csv", b'a,b\n1,"' + b"x" * 200_000),
        ("x.npy", b"\x93NUMPY\x01\x00v\x00{'descr': '<f4'"),
        ("x.npy", b"no array"),
        ("x.npz", b"PK\x03\x04 is no archive"),
        ("x.npz", b""),
        ("x.parquet", b"PAR1 and the rest is missing"),
    ],
)
def test_a_file_that_is_not_what_its_name_says(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with raises(UsageError, "unreadable-data-file"):
        list(read(tmp_path / name, Reading(2, lambda _: True), lambda _: None))


@pytest.mark.parametrize("array", [np.array(1.0), np.array([{"an": "object"}])])
def test_an_array_without_examples(array, tmp_path):
    np.save(tmp_path / "x.npy", array)
    with raises(UsageError, "unreadable-data-file"):
        list(read(tmp_path / "x.npy", Reading(2, lambda _: True), lambda _: None))


def test_data_in_a_storage_service_that_has_changed(tmp_path):
    folder = RemoteFolder(Url(f"memory://{uuid.uuid4()}"))
    job = PredictionJob(tmp_path, None, str(folder.url / "x.csv"), (), tmp_path / "y.csv", 2)
    with raises(UsageError, "no-data-file"):
        job.open()
    folder.write("x.csv", b"a\n1\n")
    job.open()
    folder.write("x.csv", b"a\n1\n2\n")
    with raises(UsageError, "other-predictions"):
        job.open()


@pytest.mark.parametrize("form", ["keras", "saved_model", "checkpoint"])
@pytest.mark.slow
def test_a_run_in_a_storage_service(form, run, x, tfdist, tmp_path):  # noqa: F811
    """Nothing of the run is on this machine, except the recipe's module."""
    folder, model = run
    url = Url(f"memory://{uuid.uuid4()}/runs/digits")
    (folder / "recipe.yaml").write_text(f"module: own_recipe\nmodule_dir: {folder}\n")
    (folder / "plan.json").write_text("{}")
    if form == "saved_model":
        api.export(model, folder / "export" / "saved_model")
    if form == "checkpoint":
        (folder / "export" / "model.keras").unlink()
        saved = Checkpoints(url / "checkpoints", keep=1)
        model.compile("sgd", "mse")
        api.fit(model, x=x, y=x[:, :2], batch_size=10, epochs=1, checkpoints=saved, verbose=0)
    for path in folder.rglob("*"):
        if path.is_file():
            RemoteFolder(url).upload(path, str(path.relative_to(folder)))
    np.save("d.npy", x)
    for output in ("o.npy", str(url.parent / "o.npy")):
        ended = tfdist("predict", url, "--data", "d.npy", "--output", output, *PART)
        assert (ended.code, ended.out.strip()) == (0, output), ended.err
    RemoteFolder(url.parent).download("o.npy", tmp_path / "stored.npy")
    for path in ("o.npy", "stored.npy"):
        np.testing.assert_allclose(np.load(path), model.predict(x, verbose=0), rtol=1e-4, atol=1e-6)
    assert not list(tmp_path.glob("predictions/*/*")), "it is uploaded"
    assert codes_in(tfdist("predict", url.parent, "--data", "d.npy", "--output", "p.npy").err) == ["not-a-run-dir"]


def test_texts_and_types_survive(tmp_path):
    columns = {"name": np.array([b"a,b", b"c"], object), "id": np.array([2**40, 3]), "pair": np.ones((2, 2), np.int32)}
    for suffix in (".csv", ".parquet"):
        FORMATS[suffix].write(tmp_path / f"1{suffix}", columns)
        FORMATS[suffix].join(tmp_path / f"o{suffix}", [tmp_path / f"1{suffix}"] * 2)
    rows = list(csv.reader((tmp_path / "o.csv").open()))
    assert rows == [["name", "id", "pair_0", "pair_1"], *[["a,b", str(2**40), "1", "1"], ["c", "3", "1", "1"]] * 2]
    with raises(UsageError, "several-outputs"):
        FORMATS[".npy"].write(tmp_path / "o.npy", columns)
