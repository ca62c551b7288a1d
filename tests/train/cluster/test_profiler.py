"""Profiles that a task takes of itself."""

import json
import threading

import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tfdist_cli.profiling.xplane import Event, Line, Plane, read_planes
from tfdist_cli.protocol.profile_order import ProfileOrder, write_order
from tfdist_cli.protocol.records import ENABLED, TASK_DIR
from tfdist_cli.train.cluster import profiler

ORDER = ProfileOrder("a", 0.15, "profile/plugins/profile/now/worker-1.xplane.pb")


@pytest.fixture
def follow(tmp_path, monkeypatch, capfd):
    """Follows an order, and returns the record with the answer."""
    monkeypatch.setenv(TASK_DIR, str(tmp_path))
    monkeypatch.setenv("TFDIST_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv(ENABLED, "1")

    def follow(work=lambda: None):
        write_order(tmp_path, ORDER)
        profiler.look_for_order()
        while any(thread.name == "tfdist-profiler" for thread in threading.enumerate()):  # it may have ended already
            work()
        [record] = (line for line in capfd.readouterr().err.split("\n") if line.startswith("\x1e"))
        return json.loads(record[1:])

    return follow


def test_a_profile_has_what_all_threads_did_and_is_read_as_by_tensorflow(follow, tmp_path):
    def multiply():
        tf.linalg.matmul(tf.ones((8, 8)), tf.ones((8, 8)))

    multiply()  # the first time takes longer
    answer = follow(multiply)
    path = tmp_path / "run" / ORDER.path
    assert list(path.parent.iterdir()) == [path]
    assert answer["kind"] == "profiled"
    assert (answer["request"], answer["bytes"]) == ("a", path.stat().st_size)
    assert 0.15 <= answer["recorded"] < 1.0
    space = xplane_pb2.XSpace.FromString(path.read_bytes())
    expected = [
        Plane(plane.name, [Line(line.name, events_of(line)) for line in plane.lines], names_of(plane))
        for plane in space.planes
    ]
    assert list(read_planes(path.read_bytes())) == expected
    assert any("MatMul" in name for plane in expected for name in plane.names.values())


def events_of(line):
    return [Event(event.metadata_id, event.offset_ps, event.duration_ps) for event in line.events]


def names_of(plane):
    return {number: metadata.name for number, metadata in plane.event_metadata.items()}


def test_a_program_that_profiles_itself_goes_on(follow, tmp_path):
    tf.profiler.experimental.start(str(tmp_path / "own"))
    try:
        assert follow()["code"] == "profiler-in-use"
    finally:
        tf.profiler.experimental.stop()
    assert len([*(tmp_path / "own").rglob("*.xplane.pb")]) == 1


def test_a_disk_that_cannot_be_written_ends_no_task(follow, tmp_path):
    (tmp_path / "run").touch()
    answer = follow()
    assert (answer["kind"], answer["request"], answer["code"]) == ("profile_failed", "a", "profile-not-saved")
    assert follow()["code"] == "profile-not-saved"


def test_without_an_order_or_a_launcher_nothing_happens(tmp_path, monkeypatch):
    threads = threading.active_count()
    monkeypatch.setenv(TASK_DIR, str(tmp_path))
    profiler.look_for_order()
    monkeypatch.delenv(TASK_DIR)
    profiler.look_for_order()
    assert threading.active_count() == threads
