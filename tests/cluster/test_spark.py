"""Trainings in a real standalone Spark of two workers, on this machine."""

import json
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.lab.spark import spark  # noqa: F401 - a fixture
from tests.support.launching import (
    LONG,
    MIRRORED,
    PATIENCE,
    await_event,
    finish,
    interrupt_program,
    project,
    start,
    start_program,
    started_in,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600), pytest.mark.rotates(5, 2)]


def test_the_training_survives_an_executor_and_ends_with_ctrl_c(spark, tmp_path):  # noqa: F811 - the fixture above
    """One training for all three: a start of Spark's executors takes seconds."""
    folder = project(tmp_path, cluster=MIRRORED, recipe_yaml=LONG)
    process = start(folder, "--on", "spark", "--set", f"spark.master_url={spark.master}", "--run-dir", "run")
    await_event(process, "run", "checkpoint")
    spark.executors()[0].kill()
    resumed = await_event(process, "run", "resumed")
    assert resumed["attempt"] == 2
    assert resumed["step"] >= 200
    process.send_signal(signal.SIGINT)
    done = finish(process, PATIENCE)
    assert done.code == 130, done.stderr
    assert done.report["attempts"] == 2
    assert Path(done.report["checkpoints"][-1]["path"]).is_dir()
    assert not started_in(folder)  # drivers, agents and tasks of both attempts
    assert not psutil.wait_procs(spark.executors(), timeout=20)[1]


def program(spark, folder, epochs):  # noqa: F811 - the fixture above
    pytest.importorskip("pandas", reason="pyspark's mapInArrow needs pandas: pip install 'tfdist-cli[spark]'")
    return start_program("spark_fit.py", folder, spark.master, folder / "store", epochs)


def test_a_pipeline_survives_an_executor(spark, tmp_path):  # noqa: F811 - the fixture above
    process = program(spark, tmp_path, 15)
    await_event(process, "store/*/run", "checkpoint")
    spark.executors()[0].kill()
    out, err = process.communicate(timeout=2 * PATIENCE)
    assert process.returncode == 0, err[-5000:]
    found = json.loads(out)
    assert found["refused"] == {
        "none": "no-such-column",
        "name": "column-not-numbers",
        "when": "column-not-numbers",
        "null": "empty-values",
        "ragged": "unequal-lists",
    }
    assert found["accuracy"] > 0.9
    assert found["kept"]
    assert found["saved"]
    (folder,) = (tmp_path / "store").iterdir()
    assert [path.name for path in folder.iterdir()] == ["run"]  # the copies of rows are gone
    assert '"resumed"' in (folder / "run" / "events.jsonl").read_text()
    assert not started_in(tmp_path)


def test_ctrl_c_in_a_program(spark, tmp_path):  # noqa: F811 - the fixture above
    result = interrupt_program(program(spark, tmp_path, 100_000))
    assert (result["code"], result["losses"]) == ("stopped-by-signal", [])
    assert result["checkpoints"][-1]["step"] > 100  # that of the end
