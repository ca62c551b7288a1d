"""`tfdist render`."""

import shlex

import pytest
import yaml

from tests.support.codes import codes_in


@pytest.fixture
def mirrored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "pair.yaml"
    path.write_text("strategy: multi_worker_mirrored\nroles: {worker: {replicas: 2}}\n")
    return path


def test_what_launch_would_do_is_printed_and_the_dry_run_ends_with_it(tfdist, mirrored):
    command = (str(mirrored), "--", "echo", "it's; here")
    rendered = tfdist("render", *command)
    assert rendered.code == 0
    lines = rendered.out.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert shlex.split(line)[-2:] == ["echo", "it's; here"]
        assert line.startswith("env 'TF_CONFIG=")
    assert tfdist("launch", str(mirrored), "--dry-run", *command[1:]).out.endswith(rendered.out)


def test_it_is_written_to_a_file_for_another_launcher(tfdist, mirrored, tmp_path):
    done = tfdist("render", str(mirrored), "--to", "local", "--output", str(tmp_path / "run.sh"), "--", "true")
    assert (done.code, done.out) == (0, "")
    assert (tmp_path / "run.sh").read_text().count("TF_CONFIG") == 2


def test_an_unknown_launcher_and_a_file_that_cannot_be_written(tfdist, mirrored, tmp_path):
    unknown = tfdist("render", str(mirrored), "--to", "mesos", "--", "true")
    assert unknown.code == 2
    assert "--set launcher" in unknown.err
    assert "'local'" in unknown.err
    refused = tfdist("render", str(mirrored), "--output", str(tmp_path), "--", "true")
    assert refused.code == 2
    assert codes_in(refused.err) == ["output-not-writable"]


@pytest.mark.parametrize("command", [("render",), ("role", "--task", "worker:0", "--cluster")])
def test_an_empty_run_directory_is_refused(command, tfdist, mirrored):
    assert codes_in(tfdist(*command, mirrored, "--run-dir", "", "--", "true").err) == ["empty-path"]


def test_there_is_something_to_render(tfdist, mirrored):
    nothing = tfdist("render", str(mirrored))
    assert nothing.code == 2
    assert codes_in(nothing.err) == ["nothing-to-run"]


def test_kubernetes_is_rendered_and_not_launched(tfdist, mirrored):
    rendered = tfdist("render", str(mirrored), "--to", "kubernetes", "--", "true")
    assert rendered.code == 0
    assert rendered.out == tfdist("render", str(mirrored), "--set", "launcher=kubernetes", "--", "true").out
    assert "kind: JobSet" in rendered.out
    refused = tfdist("launch", str(mirrored), "--on", "kubernetes", "--", "true")
    assert refused.code == 2
    assert "kubectl apply --server-side -f" in refused.err


def test_compose(tfdist, mirrored):
    rendered = tfdist("render", str(mirrored), "--to", "compose", "--", "true")
    assert rendered.code == 0
    assert list(yaml.safe_load(rendered.out)["services"]) == ["worker-0", "worker-1"]


def test_the_tasks_of_a_run_in_a_bucket_know_its_address(tfdist, mirrored):
    command = (str(mirrored), "--run-dir", "s3://bucket/runs/pair")
    for launcher in ("local", "compose", "kubernetes"):
        rendered = tfdist("render", *command, "--to", launcher, "--", "true")
        assert rendered.code == 0, rendered.err
        assert rendered.out.count("s3://bucket/runs/pair") == (1 if launcher == "kubernetes" else 2)
    refused = tfdist("render", *command, "--to", "slurm", "--", "true")
    assert (refused.code, codes_in(refused.err)) == (2, ["run-dir-not-shared"])
    dry = tfdist("launch", *command, "--dry-run", "--", "true")
    assert "TFDIST_RUN_URL" not in dry.out, "a launcher uploads the run itself"
