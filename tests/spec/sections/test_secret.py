"""Secrets come from files and from the launcher's environment, and no message repeats them."""

import shlex
import subprocess

import pytest

from tests.support.codes import raises
from tfdist_cli.errors import InvalidValue, UsageError
from tfdist_cli.spec.loading.dump import dump
from tfdist_cli.spec.loading.load import load_cluster
from tfdist_cli.spec.loading.problems import SpecError
from tfdist_cli.spec.sections.secret import SecretSpec, read_secrets

YAML = "strategy: single\nroles:\n  chief:\n    secrets: {KEY: {file: 'it''s/key'}, TOKEN: {env: MY_TOKEN}}\n"


@pytest.fixture
def cluster(tmp_path):
    (tmp_path / "it's").mkdir()
    (tmp_path / "it's" / "key").write_text("from a file\n\n")
    path = tmp_path / "c.yaml"
    path.write_text(YAML)
    return load_cluster(path)


def test_values(cluster):
    values = read_secrets(cluster.roles.chief.secrets, "chief", {"MY_TOKEN": "from a variable"})
    assert values == {"KEY": "from a file", "TOKEN": "from a variable"}


def test_a_file_of_an_editor_that_writes_carriage_returns(tmp_path):
    (tmp_path / "key").write_bytes(b"a key\r\n")
    assert SecretSpec(file=tmp_path / "key").read({}) == "a key"


def test_the_resolved_file_says_where_they_are(cluster, tmp_path):
    written = dump(cluster)
    assert "null" not in written
    assert str(tmp_path / "it's" / "key") in written.replace("''", "'")
    (tmp_path / "again.yaml").write_text(written)
    assert load_cluster(tmp_path / "again.yaml").roles == cluster.roles


def test_a_shell_has_them_by_their_source(cluster):
    secrets = cluster.roles.chief.secrets
    command = " ".join(["printf '%s|%s'", *(spec.source for spec in secrets.values())])
    run = subprocess.run(
        ["sh", "-c", command],
        env={"MY_TOKEN": "a  b", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "from a file|a  b"
    assert shlex.split(secrets["TOKEN"].source) == ["$MY_TOKEN"]


@pytest.mark.parametrize(
    ("content", "code"),
    [(None, "unreadable-file"), (b"\n", "empty-secret"), (b"a\0b", "nul-in-value"), (b"\xff", "not-utf-8")],
)
def test_a_file_without_a_value(tmp_path, content, code):
    path = tmp_path / "no" / "key"
    if content is not None:
        path.parent.mkdir()
        path.write_bytes(content)
    with pytest.raises(InvalidValue) as refused:
        SecretSpec(file=path).read()
    assert refused.value.code == code
    with raises(UsageError, "secret-not-found") as caught:
        read_secrets({"KEY": SecretSpec(file=path)}, "worker")
    assert str(caught.value).startswith("roles.worker.secrets.KEY: ")


def test_a_variable_that_is_not_set_is_not_named(cluster):
    with raises(UsageError, "secret-not-found") as caught:
        read_secrets({"KEY": SecretSpec(env="hunter2hunter2")}, "worker", {})
    assert "hunter2" not in f"{caught.value}{caught.value.hint}"


@pytest.mark.parametrize(
    "mistake",
    [
        "roles.chief.secrets.KEY=hunter2",
        "roles.chief.secrets=hunter2",
        "roles.chief.secrets.KEY.env=hunter 2 hunter2",
        "roles.chief.secrets.KEY={hunter: hunter2}",
        "roles.chief.env.KEY=[hunter2]",
        "roles.chief.env=hunter2",
        "roles.chief.env.KEY=hunter2: hunter2: x",
    ],
)
def test_no_message_repeats_what_may_be_a_value(tmp_path, mistake):
    (tmp_path / "c.yaml").write_text("strategy: single\nroles: {chief: {}}\n")
    with pytest.raises(SpecError) as caught:
        load_cluster(tmp_path / "c.yaml", [mistake])
    assert "hunter2" not in f"{caught.value}{caught.value.hint}"
