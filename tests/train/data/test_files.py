"""Files of datasets in storage services: listed and divided, and read as TensorFlow reads files of this machine."""

import gzip
import random
import uuid

import pytest
import tensorflow as tf

import tfdist_cli as tfdist
from tests.support.codes import raises
from tests.support.s3 import BUCKET, FAULTS
from tfdist_cli.errors import UsageError
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.storage import remote, remote_file, retry
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


@pytest.mark.rotates(5)
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


@pytest.fixture
def failing(s3, monkeypatch):
    """The server, whose requests can be failed, with small parts and short time-outs."""
    monkeypatch.setattr(remote, "_READ_SECONDS", 0.3)
    monkeypatch.setattr(retry, "_FIRST_DELAY", 0.01)
    for module in (files, remote_file):
        monkeypatch.setattr(module, "PART", 16_000)
    files._folder.cache_clear()  # a bucket that is open keeps its limits
    yield s3
    files._folder.cache_clear()


def everything(folder, names):
    """What a pipeline reads of the files: lines, records and whole files."""
    listed = tfdist.list_files([folder.url / "*.records"])
    data = tf.data.Dataset.from_tensor_slices(listed)
    return (
        [name.rpartition("/")[2] for name in listed] == names,
        list(data.interleave(tfdist.read_records, cycle_length=2, block_length=10**6).as_numpy_iterator()),
        list(tfdist.read_lines(folder.url / "lines").as_numpy_iterator()),
        list(data.map(tfdist.read_file).as_numpy_iterator()),
    )


@pytest.mark.rotates(5)
@pytest.mark.parametrize("fault", sorted({*FAULTS} - {"truncate"}))
def test_reading_survives_faults(fault, failing, records):
    """One of five requests fails; each example is read once nevertheless."""
    folder, names = RemoteFolder(Url(f"s3://{BUCKET}/data")), ["a.records", "b.records"]
    for name in names:
        folder.write(name, records)
    folder.write("lines", b"a line\n" * 3000)
    chance = random.Random(2)
    failing.proxy.fault = lambda method, _: fault if method in ("GET", "HEAD") and chance.random() < 1 / 5 else None
    assert everything(folder, names) == (True, 2 * RECORDS, [b"a line"] * 3000, [records] * 2)
    assert failing.proxy.injected[fault] >= 3


def test_reading_goes_on_when_the_network_is_back(failing, records):
    folder = RemoteFolder(Url(f"s3://{BUCKET}/data"))
    folder.write("a.records", records)
    reading = iter(tfdist.read_records(folder.url / "a.records"))
    found = [next(reading).numpy() for _ in range(10)]
    failing.proxy.fault = lambda *_: "lost" if failing.proxy.injected["lost"] < 6 else None
    found += [each.numpy() for each in reading]
    assert (found, failing.proxy.injected["lost"]) == (RECORDS, 6)


def test_a_network_that_does_not_come_back_ends_the_reading(failing, records, monkeypatch):
    monkeypatch.setattr(retry, "RETRY_SECONDS", 0.2)
    folder = RemoteFolder(Url(f"s3://{BUCKET}/data"))
    folder.write("a.records", records)
    reading = iter(tfdist.read_records(folder.url / "a.records"))
    next(reading)
    failing.proxy.fault = lambda *_: "lost"
    with pytest.raises(tf.errors.OpError, match=r"a\.records"):
        list(reading)


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
