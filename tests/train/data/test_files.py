"""Files of datasets in storage services: listed and divided, and read as TensorFlow reads files of this machine."""

import gzip
import uuid

import pytest
import tensorflow as tf

import tfdist_cli as tfdist
from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.storage.remote import RemoteFolder
from tfdist_cli.train.data import files, streams
from tfdist_cli.train.tf_compat.data import calls_python

pytestmark = pytest.mark.slow

TEXT = b"one\r\ntwo\n\nfour, without an end"
RECORDS = [b"", b"a record", b"\n\x00" * 1000, *(str(n).encode() for n in range(3000))]


@pytest.fixture
def folder():
    return RemoteFolder(Url(f"memory://{uuid.uuid4()}"))


@pytest.fixture
def records(tmp_path):
    """The content of a TFRecord file."""
    with tf.io.TFRecordWriter(str(tmp_path / "written")) as writer:
        for record in RECORDS:
            writer.write(record)
    return (tmp_path / "written").read_bytes()


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzipped"])
@pytest.mark.parametrize("part", [7, 1 << 20])
def test_lines_and_records(pack, part, folder, records, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PART", part)
    folder.write("lines", pack(TEXT))
    folder.write("records", pack(records))
    (tmp_path / "lines").write_bytes(pack(TEXT))
    expected = list(
        tf.data.TextLineDataset(tmp_path / "lines", "GZIP" if pack is gzip.compress else "").as_numpy_iterator()
    )
    assert list(tfdist.read_lines(folder.url / "lines").as_numpy_iterator()) == expected
    assert list(tfdist.read_lines([tmp_path / "lines", folder.url / "lines"]).as_numpy_iterator()) == 2 * expected
    data = tfdist.read_records(folder.url / "records")
    assert list(data.as_numpy_iterator()) == RECORDS
    assert list(data.as_numpy_iterator()) == RECORDS, "each pass reads the file again"


def test_as_part_of_a_pipeline(folder, records):
    for name in "ab":
        folder.write(name, records)
    data = tf.data.Dataset.from_tensor_slices([str(folder.url / name) for name in "ab"])
    lines = data.interleave(tfdist.read_records, cycle_length=2, num_parallel_calls=2).batch(10)
    assert sum(map(len, lines.as_numpy_iterator())) == 2 * len(RECORDS)
    assert not calls_python(lines), "every task can run it"
    contents = data.map(tfdist.read_file)
    assert list(contents.as_numpy_iterator()) == [records, records]


def test_an_empty_file_has_nothing(folder):
    folder.write("empty", b"")
    assert not list(tfdist.read_lines(folder.url / "empty"))
    assert not list(tfdist.read_records(folder.url / "empty"))


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:20], lambda data: b"\x01" + data[1:]])
def test_a_damaged_record_file_is_an_error(damage, folder, records):
    folder.write("records", damage(records))
    with pytest.raises(tf.errors.OpError):
        list(tfdist.read_records(folder.url / "records"))


def test_streams_that_nobody_reads_are_dropped(folder, monkeypatch):
    monkeypatch.setattr(streams, "_OPEN", 3)
    folder.write("lines", TEXT)
    for _ in range(10):
        next(iter(tfdist.read_lines(folder.url / "lines")))
    assert len(streams.STREAMS._open) <= 3


@pytest.mark.parametrize("local", [True, False])
def test_patterns(local, folder, tmp_path):
    names = ["a/1.csv", "a/2.csv", "a/3.txt", "a/b/4.csv", "c/5.csv"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        folder.write(name, b"")
    root = str(tmp_path) if local else folder.url

    def found(*patterns, **given):
        return [
            name.removeprefix(f"{root}/")
            for name in tfdist.list_files([f"{root}/{each}" for each in patterns], **given)
        ]

    assert found("a/*.csv") == ["a/1.csv", "a/2.csv"]
    assert found("*/[25].csv") == ["a/2.csv", "c/5.csv"]
    assert found("c/5.csv", "a/?.txt") == ["c/5.csv", "a/3.txt"]
    assert found("a/*", shard=tfdist.Shard(1, 2)) == ["a/2.csv"]
    with raises(UsageError, "no-such-file"):
        found("a/*.csv", "d/*.csv")


def test_a_service_that_cannot_be_listed(folder, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "denied")

    monkeypatch.setattr(type(folder._files), "find", denied)
    with raises(UsageError, "storage-unreachable"):
        tfdist.list_files(folder.url / "*.csv")
