"""What a cluster says of its hosts."""

import pytest
import yaml
from pydantic import ValidationError

from tfdist_cli.spec.loading.dump import dump
from tfdist_cli.spec.loading.load import load_cluster
from tfdist_cli.spec.loading.problems import SpecError
from tfdist_cli.spec.sections.cluster import Cluster

START = "strategy: single\nroles: {chief: {}}\n"


def problems(folder, text):
    (folder / "c.yaml").write_text(START + text)
    with pytest.raises(SpecError) as caught:
        load_cluster(folder / "c.yaml")
    return [(problem.key, problem.code) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "key", "code"),
    [
        ("hosts: []", "hosts", "empty-list"),
        ("hosts: [h1, h1]", "hosts", "duplicate-host"),
        ("hosts: [-oProxyCommand=x]", "hosts.0", "invalid-host"),
        ("hosts: [a b]", "hosts.0", "invalid-host"),
        ("hosts: [{address: h1, slot: 2}]", "hosts.0.slot", "unknown-key"),
        ("hosts: [{address: h1, slots: 0}]", "hosts.0.slots", "out-of-range"),
        ("hosts: [{address: h1, port: 70000}]", "hosts.0.port", "out-of-range"),
        ("hosts: [{address: h1, user: -x}]", "hosts.0.user", "invalid-user"),
        ("hosts: [{address: h1, python: bin/python}]", "hosts.0.python", "invalid-path"),
        ("hosts: [{user: me}]", "hosts.0.address", "missing-key"),
        ("ssh: {to: relative}", "ssh.to", "invalid-path"),
        ("ssh: {shared: true, sync: [.]}", "ssh.sync", "not-used"),
        ("ssh: {versions: some}", "ssh.versions", "unknown-choice"),
    ],
)
def test_mistakes(tmp_path, text, key, code):
    assert (key, code) in problems(tmp_path, text)


def test_paths_here_start_at_the_file_and_paths_there_stay(tmp_path):
    text = "hosts: [h1, {address: H2, python: ~/venv/bin/python}]\nssh: {sync: [., ../data], config: c, to: ~/x}\n"
    (tmp_path / "c.yaml").write_text(START + text)
    cluster = load_cluster(tmp_path / "c.yaml")
    assert cluster.ssh.sync == [tmp_path, tmp_path.parent / "data"]
    assert (cluster.ssh.config, cluster.ssh.to) == (tmp_path / "c", "~/x")
    assert [(host.address, host.python) for host in cluster.machines] == [("h1", None), ("h2", "~/venv/bin/python")]
    (tmp_path / "again.yaml").write_text(dump(cluster))
    assert load_cluster(tmp_path / "again.yaml") == cluster
    assert yaml.safe_load(dump(cluster))["hosts"] == ["h1", {"address": "h2", "python": "~/venv/bin/python"}]


def test_tasks_without_addresses_may_stand_beside_others_where_there_are_hosts():
    spec = {"strategy": "multi_worker_mirrored", "roles": {"chief": {}, "worker": {"hosts": ["10.0.0.1:2222"]}}}
    assert Cluster.model_validate({**spec, "hosts": ["h1"]}).hosts == ["h1"]
    with pytest.raises(ValidationError) as caught:
        Cluster.model_validate(spec)
    [details] = caught.value.errors()
    assert [problem.code for problem in details["ctx"]["error"].problems] == ["missing-address"]
