"""Runs the tasks of a plan in a barrier stage of Spark."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.slots.application import Submission
from tfdist_cli.launch.slots.launcher import SlotLauncher, own_host
from tfdist_cli.launch.spark import driver, session
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.engines import SparkSpec

_SUBMIT = "spark-submit"
_HOME = "SPARK_HOME"


class SparkLauncher(SlotLauncher):
    """Submits a Spark application whose driver runs on this machine, or uses the session of a program."""

    def __init__(self) -> None:
        super().__init__()
        self._in_session = False

    def check(self, cluster: Cluster, command: Sequence[str]) -> None:
        """Checks the engine's programs, unless a session runs already, and that no task has an address."""
        self._in_session = bool(cluster.spark and cluster.spark.session)
        super().check(cluster, command)

    def check_engine(self) -> None:
        """Checks for `spark-submit` and Java."""
        if self._in_session:
            return
        if spark_home() is None and shutil.which(_SUBMIT) is None:
            raise UsageError(
                f"{_SUBMIT} is not on PATH",
                code="program-not-found",
                hint=f"pip install 'tfdist-cli[spark]', or set {_HOME} to your cluster's Spark, 3.5 or later",
            )
        if not os.environ.get("JAVA_HOME") and shutil.which("java") is None:
            raise UsageError(
                "Spark needs Java, and java is not on PATH",
                code="program-not-found",
                hint="install Java 17, such as with `apt-get install openjdk-17-jre-headless`, or set JAVA_HOME",
            )

    def submission(self, cluster: Cluster) -> Submission:
        """Returns the `spark-submit` command."""
        spec = cluster.spark or SparkSpec()
        if spec.session:
            return _in_session(cluster, spec, spec.session)
        home = spark_home()
        submit = str(Path(home, "bin", _SUBMIT)) if home else _SUBMIT
        slots = len(cluster.tasks)

        def argv(launcher: str) -> Sequence[str]:
            command = [submit, *(["--master", spec.master_url] if spec.master_url else []), "--name", cluster.name]
            for name, value in properties(cluster, spec).items():
                command += ["--conf", f"{name}={value}"]
            return [*command, driver.__file__, launcher, str(slots)]

        env = {_HOME: home} if home else {}
        given = properties(cluster, spec).get("spark.driver.host")
        host = spec.address or given or own_host(*_master_address(spec.master_url))
        return Submission("Spark", argv, host, slots, spec.wait_seconds, env, spec.secrets)


def _in_session(cluster: Cluster, spec: SparkSpec, path: Path) -> Submission:
    slots = len(cluster.tasks)

    def argv(launcher: str) -> Sequence[str]:
        return [sys.executable, "-m", session.__name__, str(path), launcher, str(slots), str(spec.slots_seconds)]

    return Submission("Spark", argv, spec.address or own_host(""), slots, spec.wait_seconds)


def spark_home() -> str | None:
    """Returns the folder of the Spark to use: `SPARK_HOME`, or that of the package pyspark."""
    if os.environ.get(_HOME):
        return os.environ[_HOME]
    found = importlib.util.find_spec("pyspark")
    home = Path(found.origin).parent if found and found.origin else None
    return str(home) if home and Path(home, "bin", _SUBMIT).exists() else None  # the package pyspark-client has none


def properties(cluster: Cluster, spec: SparkSpec) -> dict[str, str]:
    """Returns the application's properties: those that barrier stages need, those of the file, and defaults.

    Secrets are not among them: arguments of a command are visible to every user of the machine.
    """
    cpus = max(cluster.role(task).cpus or 1 for task in cluster.tasks)
    given = {
        "spark.executor.instances": str(len(cluster.tasks)),
        "spark.task.cpus": str(cpus),
        "spark.ui.showConsoleProgress": "false",
        # By default Spark counts the slots again after 15 s if executors are missing at first.
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": str(spec.slots_seconds),
    }
    fixed = {
        "spark.submit.deployMode": "client",
        "spark.dynamicAllocation.enabled": "false",
        "spark.pyspark.driver.python": sys.executable,
        "spark.pyspark.python": spec.python or sys.executable,
    }
    clear = {name: str(value) for name, value in spec.conf.items() if name not in spec.secrets}
    return {**given, **clear, **fixed}


def _master_address(master: str | None) -> tuple[str, int]:
    """Returns host and port in a master's URL; empty if it has none."""
    if (master or "").startswith("local"):
        return "127.0.0.1", 1
    first = (master or "").partition(",")[0]
    server = first.removeprefix("k8s://")
    url = urlsplit(server if "://" in server else first)  # k8s://HOST:PORT has no protocol of its own
    return url.hostname or "", url.port or 1
