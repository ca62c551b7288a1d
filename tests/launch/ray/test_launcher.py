"""The driver's command, and what is checked before it runs."""

import importlib.util
import json
import sys

import pytest

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.ray import driver, launcher
from tfdist_cli.spec.sections.cluster import Cluster

ROLES = {"chief": {}, "ps": {"memory": "2GiB"}, "worker": {"replicas": 2, "cpus": 3, "gpus": 1}}


def cluster(**ray):
    return Cluster.model_validate({"strategy": "parameter_server", "launcher": "ray", "roles": ROLES, "ray": ray})


def test_each_task_is_a_bundle():
    submission = launcher.RayLauncher().submission(cluster(address="127.0.0.1:6379", placement="spread"))
    python, *module, address, settings = submission.argv("here:1")
    worker = {"CPU": 3, "GPU": 1}
    assert (python, module, address) == (sys.executable, ["-m", driver.__name__], "here:1")
    assert json.loads(settings)["bundles"] == [{"CPU": 1}, worker, worker, {"CPU": 1, "memory": 2 * 1024**3}]
    assert json.loads(settings)["strategy"] == "SPREAD"
    assert (submission.host, submission.slots) == ("127.0.0.1", 4)


@pytest.mark.parametrize(
    ("spec", "host"),
    [
        ({"address": "ray://127.0.0.1:10001"}, "127.0.0.1"),
        ({"address": "ray://127.0.0.1:10001", "launcher_address": "edge"}, "edge"),
        ({"address": "auto", "launcher_address": "10.0.0.1"}, "10.0.0.1"),
    ],
)
def test_the_address_for_nodes(spec, host):
    assert launcher.RayLauncher().submission(cluster(**spec)).host == host


def test_the_package_is_needed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises(UsageError, "package-missing"):
        launcher.RayLauncher().check(cluster(), ())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConnectionError("Could not find any running Ray instance."), "ray-unreachable"),
        (RuntimeError("…\nModuleNotFoundError: No module named 'tfdist_cli'"), "tfdist-missing"),
        (RuntimeError("…\nRuntimeError: the agent … exited with code 1: No module named 'yaml'"), "tfdist-missing"),
        (RuntimeError("The actor died unexpectedly\nmore"), "slots-lost"),
        (RuntimeError(), "slots-lost"),
    ],
)
def test_reasons_of_ray(error, code):
    assert driver._driver_error(error).code == code


def test_the_reason_of_a_server_is_its_last_line():
    error = ConnectionAbortedError(
        "Initialization failure from server:\nTraceback …\n  File …\nRuntimeError: it died\n"
    )
    assert driver._driver_error(error).message.endswith("it died")
