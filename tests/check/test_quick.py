"""The checks that a launch makes."""

import json

import pytest

from tfdist_cli.check.quick import quick_findings
from tfdist_cli.spec.loading.load import load_run

GOOD = """
import os.path
import json as j

def model(params): ...

def dataset(params, split, shard):
    return make(shard)
"""
pytestmark = pytest.mark.tensorflow


@pytest.fixture
def found(tmp_path):
    """Returns codes and places of the findings of a module in a cluster with two workers."""

    def of(text, *overrides, environ=None):
        (tmp_path / "one.py").write_text(text)
        (tmp_path / "one.yaml").write_text("module: one\n")
        cluster = tmp_path / "cluster.yaml"
        cluster.write_text(
            "strategy: parameter_server\nroles: {chief: {}, ps: {}, worker: {replicas: 2}}\nrecipe: one.yaml\n"
        )
        environ = {"KERAS_HOME": str(tmp_path)} if environ is None else environ
        findings = quick_findings(*load_run(cluster, None, overrides), environ)
        return [(each.code, each.place.removeprefix(f"{tmp_path}/")) for each in findings]

    return of


def test_nothing(found):
    assert not found(GOOD)


def test_an_import_that_is_missing(found, tmp_path):
    text = "import numpy\nfrom nowhere.at_all import x\nimport beside\n" + GOOD
    (tmp_path / "beside.py").write_text("")
    assert found(text) == [("missing-import", "one.py:2")]


def test_an_import_by_the_name_of_the_command(found):
    assert found("import tfdist\n" + GOOD) == [("wrong-import", "one.py:1")]


def test_other_hosts_have_other_packages_and_settings(found):
    text = "import nowhere\n" + GOOD
    assert not found(text, "launcher=ssh", "hosts=[a, b]", environ={"KERAS_BACKEND": "jax"})


def test_an_import_that_is_caught_is_not_missed(found):
    text = "try:\n    import nowhere\nexcept ImportError:\n    pass\n" + GOOD
    assert not found(text)


def test_the_backend_that_the_environment_selects(found):
    assert found(GOOD, environ={"KERAS_BACKEND": "jax"}) == [("keras-backend", "role chief")]
    assert not found(
        GOOD,
        "roles.chief.env.KERAS_BACKEND=tensorflow",
        "roles.worker.env.KERAS_BACKEND=tensorflow",
        environ={"KERAS_BACKEND": "jax"},
    )


def test_the_backend_that_a_role_selects(found):
    assert found(GOOD, "roles.worker.env.KERAS_BACKEND=torch") == [("keras-backend", "role worker")]


def test_the_backend_of_kerass_file(found, tmp_path):
    (tmp_path / "keras.json").write_text(json.dumps({"backend": "jax"}))
    assert found(GOOD) == [("keras-backend", "role chief")]


def test_errors_come_first(found):
    text = GOOD.replace("make(shard)", "make()").replace("(params):", "():")
    assert [code for code, _ in found(text)] == ["recipe-function-parameters", "shard-ignored"]


def test_data_that_each_worker_sees_whole_has_no_shards(found):
    text = GOOD.replace("make(shard)", "make()")
    assert found(text) == [("shard-ignored", "one.py:7")]
    assert not found(text, "train.share=copy")
    assert not found(text, "roles.worker.replicas=1")


def test_a_module_of_an_installed_package_is_read(found):
    assert found(GOOD, "module=json") == [("recipe-function-missing", json.__file__)] * 2
