"""`tfdist tf-config`."""

import json

from tests.support.codes import codes_in
from tests.support.ports import GIVEN_PORT


def test_just_the_json(tfdist, cluster_file):
    result = tfdist("tf-config", cluster_file, "--task", "worker:1")
    assert (result.code, result.err) == (0, "")
    assert json.loads(result.out) == {
        "cluster": {
            "chief": ["127.0.0.1:2222"],
            "worker": ["127.0.0.1:2223", "127.0.0.1:2224"],
            "ps": [f"127.0.0.1:{GIVEN_PORT}"],
        },
        "task": {"type": "worker", "index": 1},
    }


def test_overrides(tfdist, cluster_file):
    result = tfdist("tf-config", cluster_file, "-t", "ps", "-s", "roles.worker.replicas=1")
    assert json.loads(result.out)["cluster"]["worker"] == ["127.0.0.1:2223"]


def test_no_such_task(tfdist, cluster_file):
    result = tfdist("tf-config", cluster_file, "--task", "worker:2")
    assert (result.code, result.out) == (2, "")
    assert codes_in(result.err) == ["unknown-task"]
    assert "worker:2" in result.err
    assert "chief:0, worker:0, worker:1, ps:0\n" in result.err


def test_a_recipes_override_is_no_business_of_this_command(tfdist, cluster_file):
    result = tfdist("tf-config", cluster_file, "--task", "chief", "-s", "train.epochs=1")
    assert result.code == 2
    assert codes_in(result.err) == ["unknown-key"]
