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
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts: []", "the list is empty"),
        ("hosts: [h1, h1]", "h1 is listed more than once: give it slots"),
        ("hosts: [-oProxyCommand=x]", "cannot be a host name"),
        ("hosts: [a b]", "cannot be a host name"),
        ("hosts: [{address: h1, slot: 2}]", "hosts.0.slot: unknown key, did you mean 'slots'?"),
        ("hosts: [{address: h1, slots: 0}]", "expected 1 or more"),
        ("hosts: [{address: h1, port: 70000}]", "at most 65535"),
        ("hosts: [{address: h1, user: -x}]", "cannot be a user"),
        ("hosts: [{address: h1, python: bin/python}]", "is no path on a host"),
        ("hosts: [{user: me}]", "hosts.0.address: missing key"),
        ("ssh: {to: relative}", "begins with '/' or '~/'"),
        ("ssh: {shared: true, sync: [.]}", "ssh.sync: does nothing with 'shared: true'"),
        ("ssh: {versions: some}", "expected 'same' or 'any'"),
    ],
)
def test_mistakes(tmp_path, text, message):
    assert any(message in problem for problem in problems(tmp_path, text)), problems(tmp_path, text)


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
    with pytest.raises(ValidationError, match="another machine"):
        Cluster.model_validate(spec)
