"""Checkpoints in a storage service: in memory for the logic, on a real S3 server with faults for the whole."""

import itertools
import random
import threading
import uuid
from functools import partial

import keras
import pytest

import tfdist_cli as tfdist
from tests.support.codes import raises
from tests.support.compare import batches, classes, classifier, difference
from tests.support.s3 import FAULTS
from tfdist_cli.errors import ResultNotSaved, TrainingError
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.storage import remote, retry
from tfdist_cli.storage.remote import RemoteFolder
from tfdist_cli.storage.retry import Retry
from tfdist_cli.train.checkpoint import uploads, writer
from tfdist_cli.train.checkpoint.bucket import BucketCheckpoints
from tfdist_cli.train.checkpoint.files.state import DamagedCheckpoint, TrainingState
from tfdist_cli.train.checkpoint.writer import CheckpointContent, CheckpointWriter
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.trainer.config import checkpoints as module

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def step():
    step = ModelStep(classifier())
    step.build(batches().element_spec)
    return step


@pytest.fixture
def url():
    return Url(f"memory://{uuid.uuid4()}")


@pytest.fixture
def records(monkeypatch):
    """What the writer reported: kind and step."""
    records = []
    monkeypatch.setattr(writer, "emit", lambda kind, **fields: records.append((kind, fields["step"])))
    return records


def checkpoints(url, scratch, keep=3):
    folder = BucketCheckpoints(url, keep, scratch, RemoteFolder(url, Retry(0)))
    folder.prepare()
    return folder


def save(folder, step, number, **state):
    """Saves and uploads a checkpoint. Returns the results that were reported."""
    results = []
    folder.save(step, TrainingState(number, 0, **state))
    folder.publish(number, results.append)
    folder.flush()
    return results


def sealed(folder):
    return [step for step in folder.steps() if step not in folder._not_uploaded()]


class Broken(RemoteFolder):
    """A service that fails at the n-th change, as if the training were killed there."""

    def __init__(self, url, at):
        super().__init__(url, Retry(0))
        self.left = at
        for name in ("upload", "write", "copy"):
            setattr(self, name, self.counted(getattr(self, name)))

    def counted(self, change):
        def counting(*given):
            self.left -= 1
            if self.left < 0:
                raise ConnectionResetError
            return change(*given)

        return counting

    def delete(self, names):
        for name in list(names):
            self.counted(super().delete)([name])


def test_the_service_has_the_files_of_a_local_checkpoint(step, url, tmp_path):
    folder = checkpoints(url, tmp_path / "local")
    (result,) = save(folder, step, 10)
    assert result == url / "step-00000010"
    found = folder.find(10)
    assert sorted(folder._remote.sizes("step-00000010")) == sorted(
        f"step-00000010/{name}" for name in ("state.json", *found.state.files)
    )


def test_old_checkpoints_are_removed_everywhere(step, url, tmp_path):
    folder = checkpoints(url, tmp_path / "local", keep=2)
    for number in (1, 2, 3, 4):
        save(folder, step, number)
    assert sealed(folder) == [3, 4]
    assert {name.partition("/")[0] for name in folder._remote.sizes()} == {"step-00000003", "step-00000004"}
    assert sorted(path.name for path in (tmp_path / "local").glob("step-*")) == ["step-00000004"]


def test_unevaluated_checkpoints_are_kept(step, url, tmp_path):
    folder = checkpoints(url, tmp_path / "local", keep=1)
    BucketCheckpoints(url, remote=RemoteFolder(url)).mark_evaluated([1])
    for number in (1, 2, 3):
        save(folder, step, number)
    assert sealed(folder) == [2, 3]


def test_resume_on_another_machine(step, url, tmp_path):
    save(checkpoints(url, tmp_path / "local"), step, 10)
    folder = checkpoints(url, tmp_path / "other")
    found, damaged = folder.newest()
    assert (found.state.step, found.location, damaged) == (10, url / "step-00000010", {})
    folder.restore(found, step)
    save(folder, step, 20)
    assert not list((tmp_path / "other").glob(".downloaded-*")), "the copy is removed once a newer one is uploaded"


@pytest.mark.parametrize("damage", ["changed", "shorter", "missing", "seal changed"])
def test_a_damaged_checkpoint_is_skipped(damage, step, url, tmp_path):
    folder = checkpoints(url, tmp_path / "local")
    save(folder, step, 10)
    save(folder, step, 20)
    name = "step-00000020/" + ("state.json" if damage == "seal changed" else "variables.index")
    content = folder._remote.read(name)
    if damage == "missing":
        folder._remote.delete([name])
    else:
        folder._remote.write(name, content[:-1] if damage == "shorter" else content[:-1] + b"?")
    reader = checkpoints(url, tmp_path / "other")
    found, damaged = reader.newest()
    assert (found.state.step, list(damaged)) == (10, [20])
    assert reader.set_aside(20) == url / "damaged-step-00000020"
    assert reader.steps() == [10]


def test_a_checkpoint_without_seal_is_removed(step, url, tmp_path):
    folder = checkpoints(url, tmp_path / "local")
    save(folder, step, 10)
    folder._remote.write("step-00000020/variables.index", b"partial")
    assert folder.steps() == [10]
    assert checkpoints(url, tmp_path / "other").newest()[0].state.step == 10
    assert {name.partition("/")[0] for name in folder._remote.sizes()} == {"step-00000010"}


@pytest.mark.parametrize("number", [20, 10], ids=["added", "replaced"])
def test_a_kill_at_any_change_leaves_a_whole_checkpoint(number, step, url, tmp_path):
    for at in itertools.count():
        place, scratch = url / str(at), tmp_path / str(at)
        save(checkpoints(place, scratch, keep=1), step, 10)
        broken = Broken(place, at)
        folder = BucketCheckpoints(place, 1, scratch, broken)
        for variable in step.parameters:
            variable.assign(variable + 1)
        save(folder, step, number, batches=7)
        other = checkpoints(place, tmp_path / f"{at}-other", keep=1)
        found, damaged = other.newest()
        assert (found.state.step in (10, number), damaged) == (True, {})
        assert not [name for name in other._remote.sizes() if name.startswith(".")]
        if broken.left > 0:
            assert (found.state.step, found.state.batches) == (number, 7)
            assert at > 5, "both checkpoints have several objects"
            return


def test_only_the_seal_is_uploaded_if_no_file_has_changed(step, url, tmp_path, monkeypatch):
    folder = checkpoints(url, tmp_path / "local")
    save(folder, step, 10)
    monkeypatch.setattr(folder._remote, "upload", None)
    folder.save(step, TrainingState(10, 1, final=True), changed=False)
    folder.publish(10, lambda _: None)
    folder.flush()
    assert checkpoints(url, tmp_path / "other").find(10).state.final


def test_a_local_copy_that_was_not_uploaded_is_resumed_from(step, url, tmp_path):
    save(checkpoints(url, tmp_path / "local"), step, 10)
    folder = BucketCheckpoints(url, 3, tmp_path / "local", Broken(url, 0))
    (result,) = save(folder, step, 20)
    assert isinstance(result, OSError)
    again = checkpoints(url, tmp_path / "local")
    assert again.newest()[0].path == tmp_path / "local" / "step-00000020"
    assert checkpoints(url, tmp_path / "other").newest()[0].state.step == 10


def test_an_uploaded_local_copy_counts_only_while_the_service_has_it(step, url, tmp_path):
    """Who empties the bucket trains from the beginning."""
    folder = checkpoints(url, tmp_path / "local")
    save(folder, step, 10)
    assert folder.find(10).path == tmp_path / "local" / "step-00000010", "nothing is downloaded"
    folder._remote.delete(folder._remote.sizes())
    assert checkpoints(url, tmp_path / "local").newest() == (None, {})


@pytest.mark.parametrize(
    ("error", "code"),
    [(PermissionError(13, "denied"), "checkpoint-dir-not-writable"), (TimeoutError(), "storage-unreachable")],
)
def test_a_service_that_cannot_be_written(error, code, url, tmp_path, monkeypatch):
    folder = BucketCheckpoints(url, 3, tmp_path / "local", RemoteFolder(url, Retry(0)))

    def fail(*_):
        raise error

    monkeypatch.setattr(type(folder._remote._files), "pipe_file", fail)
    with raises(TrainingError, code):
        folder.prepare()


class Gate:
    """An upload that ends when it is told to."""

    @staticmethod
    def note(steps, step, _result):
        steps.append(step)

    def __init__(self):
        self.open, self.busy, self.uploaded = threading.Event(), threading.Event(), []

    def __call__(self, step):
        self.busy.set()
        assert self.open.wait(60)
        self.uploaded.append(step)
        return Url("memory://x")


def test_of_the_waiting_checkpoints_the_newest_is_uploaded():
    gate, reported = Gate(), []
    queue = uploads.Uploads(gate)
    for number in (1, 2, 3):
        queue.add(number, partial(Gate.note, reported, number))
        assert gate.busy.wait(60)
    gate.open.set()
    queue.wait()
    assert gate.uploaded == reported == [1, 3]


def test_one_that_waits_stays_here_until_a_newer_one_takes_its_place(step, url, tmp_path, monkeypatch):
    """The upload that runs may end at any time, and the next one begins then."""
    folder, found = checkpoints(url, tmp_path / "local"), []
    folder.save(step, TrainingState(1, 0))
    folder.save(step, TrainingState(2, 0))
    monkeypatch.setattr(folder._uploads, "add", lambda *_: found.append((folder.path / "step-00000001").exists()))
    folder.publish(2, found.append)
    assert found == [True]
    assert not (folder.path / "step-00000001").exists()


def test_training_does_not_wait_for_uploads(step, url, tmp_path, monkeypatch, records):
    gate = Gate()
    folder = checkpoints(url, tmp_path / "local")
    upload = folder._uploads._upload

    def later(number):
        gate(number)
        return upload(number)

    monkeypatch.setattr(folder._uploads, "_upload", later)
    saving = CheckpointWriter(folder, step)
    for number in (1, 2, 3):
        saving.save(CheckpointContent(TrainingState(number, 0)), wait=False)
    saving.finish()
    assert records == []
    gate.open.set()
    saving.save(CheckpointContent(TrainingState(4, 0)), wait=True)
    assert records[-1] == ("checkpoint", 4)
    assert 4 in sealed(folder)
    assert saving.unsaved is None


@pytest.fixture
def s3(s3, monkeypatch):
    """The server, with short time-outs."""
    monkeypatch.setattr(remote, "_READ_SECONDS", 0.5)
    return s3


def fit(scratch, monkeypatch, **given):
    monkeypatch.setattr(module, "scratch_folder", lambda *_: scratch)
    keras.utils.set_random_seed(3)
    model = classifier()
    saved = tfdist.Checkpoints("s3://bucket/run", every_steps=3) if scratch else None
    tfdist.fit(model, classes(100), checkpoints=saved, **given)
    return model


@pytest.mark.rotates(5)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_training_survives_faults(fault, s3, tmp_path, monkeypatch):
    """One of six requests fails, in a training and in the one that resumes it on another machine."""
    whole = fit(None, monkeypatch, max_steps=11)
    reads = ("GET", "HEAD", "PUT", "DELETE") if fault not in ("truncate", "cut response") else ("PUT",)
    chance, rate = random.Random(0), 1 / 6 if "GET" in reads else 1 / 3
    s3.proxy.fault = lambda method, _path: fault if method in reads and chance.random() < rate else None
    fit(tmp_path / "first", monkeypatch, max_steps=6)
    model = fit(tmp_path / "second", monkeypatch, max_steps=11)
    assert difference(whole.variables, model.variables) == 0
    assert s3.proxy.injected[fault] >= 2


def test_the_last_checkpoint_cannot_be_uploaded(s3, tmp_path, monkeypatch):
    monkeypatch.setattr(retry, "RETRY_SECONDS", 0.5)
    s3.proxy.fault = lambda method, path: "503" if method == "PUT" and "step-" in path else None
    with raises(ResultNotSaved, "checkpoint-not-written") as caught:
        fit(tmp_path / "local", monkeypatch, max_steps=7)
    assert str(tmp_path / "local") in (caught.value.hint or "")
    s3.proxy.fault = lambda *_: None
    fit(tmp_path / "local", monkeypatch, max_steps=7)
    assert "run/step-00000007/state.json" in s3.names()


def test_no_secret_is_in_messages(s3, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(retry, "RETRY_SECONDS", 0.1)
    for fault in FAULTS:
        s3.proxy.fault = lambda *_, fault=fault: fault
        with pytest.raises(TrainingError) as caught:
            fit(tmp_path / "local", monkeypatch, max_steps=3)
        text = f"{caught.value} {caught.value.hint} {caplog.text}"
        assert "secret-of-a-test" not in text
        assert "key-of-a-test" not in text


def test_a_missing_checkpoint(url):
    with pytest.raises(DamagedCheckpoint):
        BucketCheckpoints(url, remote=RemoteFolder(url)).find(3)
