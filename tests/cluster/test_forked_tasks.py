"""What a recipe's forked task has of the variables that TensorFlow and numpy read when they were imported."""

import json

import pytest

from tests.support.launching import RECIPE, launch, project

CLUSTER = """
strategy: single
roles: {chief: {cpus: 2, env: {TF_CPP_MIN_LOG_LEVEL: "1"}}}
recipe: recipe.yaml
"""
RECIPE_YAML = "module: four_classes\ntrain: {epochs: 1, batch_size: 64}\n"
TOLD = """

def report():
    import ctypes, json, os, pathlib, psutil, re
    maps = pathlib.Path("/proc/self/maps").read_text()
    def call(library, name):
        (path,) = {path for path in re.findall(r"/.+$", maps, re.MULTILINE) if library in os.path.basename(path)}
        return getattr(ctypes.CDLL(path), name)()
    return json.dumps({
        "parent": psutil.Process(os.getppid()).cmdline(),
        "level": call("libtensorflow_framework", "_ZN4absl12lts_2025081411MinLogLevelEv"),
        "threads": call("openblas", "scipy_openblas_get_num_threads64_"),
    })


print("reported " + report())
"""


@pytest.mark.cluster
def test_what_is_read_at_the_import_holds_in_a_fork(tmp_path):
    done = launch(project(tmp_path, CLUSTER, RECIPE + TOLD, RECIPE_YAML))
    assert done.code == 0, done.stderr
    log = (done.run_dir / "attempt_1" / "chief-0" / "stdout.log").read_text()
    (line,) = [line for line in log.splitlines() if line.startswith("reported ")]
    reported = json.loads(line[len("reported ") :])
    assert "tfdist_cli.launch.process.fork_server" in reported["parent"]
    assert reported["level"] == 1
    assert reported["threads"] == 2
