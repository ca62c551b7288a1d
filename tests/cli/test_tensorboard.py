"""`tfdist tensorboard`: TensorBoard on the folders of runs."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.support.codes import codes_in
from tests.support.recorded import trained_run
from tfdist_cli import requirements
from tfdist_cli.protocol.profile_order import PROFILE_SUFFIX, PROFILES
from tfdist_cli.run_storage.upload import FolderUpload
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.storage.remote import RemoteFolder

pytestmark = pytest.mark.tensorflow  # which brings TensorBoard


@pytest.fixture
def tensorboard(tfdist, monkeypatch):
    """The arguments that TensorBoard is started with, or the codes of the errors."""

    def start(*arguments):
        started = []

        def execv(_, argv):
            started.extend(argv)
            sys.exit(0)

        monkeypatch.setattr(os, "execv", execv)
        result = tfdist("tensorboard", *arguments)
        return started[3:] if result.code == 0 else codes_in(result.err)

    return start


def tracked(path, *folders):
    run = trained_run(path).path
    for folder in folders or ["tracking/tensorboard"]:
        (run / folder / "train").mkdir(parents=True)
        (run / folder / "train" / "events.out.tfevents.1.host").touch()
    return run


def test_the_latest_run_on_this_machine_only(tensorboard, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tracked(tmp_path / "runs" / "digits-1")
    (tmp_path / "runs" / "latest").symlink_to("digits-1")
    folder = str(run / "tracking" / "tensorboard")
    assert tensorboard() == ["--logdir", folder, "--host", "127.0.0.1", "--port", "6006"]
    assert tensorboard("--host", "0.0.0.0", "--port", 0)[2:] == ["--host", "0.0.0.0", "--port", "0"]


def test_several_runs_and_the_callback_of_keras(tensorboard, tmp_path):
    one = tracked(tmp_path / "a:1", "tracking/tensorboard", "tensorboard")
    two = tracked(tmp_path / "b", "tensorboard")
    assert tensorboard(one, two)[:2] == [
        "--logdir_spec",
        f"a-1/tensorboard:{one}/tensorboard,a-1:{one}/tracking/tensorboard,b/tensorboard:{two}/tensorboard",
    ]


def test_runs_whose_folders_have_one_name(tensorboard, tmp_path):
    """Those of `tfdist.spark.fit` have: STORE/NAME/run."""
    one, two = tracked(tmp_path / "first" / "run"), tracked(tmp_path / "second" / "run")
    assert tensorboard(one, two)[:2] == [
        "--logdir_spec",
        f"first/run:{one}/tracking/tensorboard,second/run:{two}/tracking/tensorboard",
    ]


def test_an_event_file_in_the_folder_of_the_run(tensorboard, tmp_path):
    one, two = tracked(tmp_path / "a"), tracked(tmp_path / "b")
    (one / "events.out.tfevents.1.host").touch()
    assert tensorboard(one)[:2] == ["--logdir", str(one)]
    assert tensorboard(one, two)[:2] == ["--logdir_spec", f"a:{one},b:{two}/tracking/tensorboard"]


def test_one_run_is_one_folder_as_the_plugin_for_profiles_needs_it(tensorboard, tmp_path):
    run = trained_run(tmp_path / "a").path
    (run / PROFILES / "now").mkdir(parents=True)
    (run / PROFILES / "now" / f"worker-1{PROFILE_SUFFIX}").touch()
    assert tensorboard(run)[:2] == ["--logdir", str(run / "profile")]
    (run / "tensorboard").mkdir()
    (run / "tensorboard" / "events.out.tfevents.1.host").touch()
    assert tensorboard(run)[:2] == ["--logdir", str(run)]


def test_what_cannot_be_shown(tensorboard, tmp_path, monkeypatch):
    assert tensorboard(tmp_path) == ["not-a-run-dir"]
    assert tensorboard(trained_run(tmp_path / "plain").path) == ["no-event-files"]
    assert tensorboard(tracked(tmp_path / "a,b"), tracked(tmp_path / "c")) == ["tensorboard-path"]
    monkeypatch.setattr(requirements, "_is_installed", lambda _: False)
    assert tensorboard(tmp_path / "c") == ["no-tracker-library"]


def test_a_stored_run_is_followed(tfdist, tmp_path, monkeypatch):
    remote, run = RemoteFolder(Url(f"memory://{uuid.uuid4()}/a")), tracked(tmp_path / "a")
    FolderUpload(run, remote).upload_changes()
    shown: list[Any] = []

    class Started:
        def __init__(self, argv):
            shown.append(Path(argv[argv.index("--logdir") + 1]))

        def wait(self, seconds):
            shown.append([path.name for path in shown[0].rglob("*tfevents*")])
            if len(shown) > 2:
                return 0
            (run / "tracking" / "tensorboard" / "later.tfevents.2").touch()
            FolderUpload(run, remote).upload_changes()
            raise subprocess.TimeoutExpired("tensorboard", seconds)

        def terminate(self):
            shown.append("ended")

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(subprocess, "Popen", Started)
    before = signal.getsignal(signal.SIGTERM)
    assert tfdist("tensorboard", remote.url).code == 0
    signal.signal(signal.SIGTERM, before)
    first = "events.out.tfevents.1.host"
    assert [sorted(each) for each in shown[1:3]] == [[first], [first, "later.tfevents.2"]]
    assert shown[3] == "ended"
    assert not shown[0].exists(), "the copy is removed"
