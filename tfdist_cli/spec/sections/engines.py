"""The cluster file's `spark` and `ray`: how `launcher: spark` and `launcher: ray` run the tasks in these engines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from tfdist_cli.errors import InvalidValue
from tfdist_cli.spec.sections.model import Inconsistent, KeyProblem, PathField, SpecModel
from tfdist_cli.spec.sections.secret import SecretSpec

_SET_BY_TFDIST = {
    "spark.master": "write it as spark.master_url of the cluster file",
    "spark.app.name": "write it as the cluster's name",
    "spark.submit.deployMode": "the driver runs beside `tfdist launch`",
    "spark.dynamicAllocation.enabled": "barrier stages need a fixed number of executors",
    "spark.pyspark.python": "write it as spark.python of the cluster file",
    "spark.pyspark.driver.python": "the driver runs with the Python of `tfdist`",
}

_SECRET = re.compile(r"(secret|password|passphrase|token|(access|secret)[._-]?key)$", re.IGNORECASE)
"""The names of properties whose values are secret, as Spark's own `spark.redaction.regex` has them."""
_NAMES_SECRETS = re.compile(r"spark\.kubernetes\.(driver|executor)\.secret(s|KeyRef)\.")
"""Properties whose values are paths and keys of Kubernetes' secrets."""


def _check_property(name: str) -> str:
    if not name.startswith("spark.") or "=" in name or not name.isprintable() or " " in name:
        message = f"{name!r} is not a property of Spark: expected one such as 'spark.executor.memory'"
        raise InvalidValue(message, code="invalid-spark-property")
    if name in _SET_BY_TFDIST:
        raise InvalidValue(f"{name} is set by tfdist: {_SET_BY_TFDIST[name]}", code="reserved-spark-property")
    return name


def _check_master(url: str) -> str:
    if url.startswith("sc://"):
        raise InvalidValue(
            f"{url} is a server of Spark Connect, which runs no barrier stages: write its master, spark://HOST:PORT, "
            "yarn or k8s://…",
            code="spark-connect",
        )
    return url


def _check_not_clear(conf: dict[str, str | int | float | SecretSpec]) -> dict[str, str | int | float | SecretSpec]:
    """Rejects secrets in the file; no message repeats a value."""
    clear = [
        name
        for name, value in conf.items()
        if _SECRET.search(name) and not _NAMES_SECRETS.match(name) and not isinstance(value, SecretSpec)
    ]
    message = "its value is a secret, which must not be in the file: write {env: VARIABLE} or {file: path}"
    if clear:
        raise Inconsistent([KeyProblem((name,), message, code="secret-in-clear") for name in clear])
    return conf


class SparkSpec(SpecModel):
    """How the tasks run in Spark."""

    master_url: Annotated[str, Field(min_length=1), AfterValidator(_check_master)] | None = None
    """The master: `spark://HOST:PORT`, `yarn` or `k8s://…`. By default that of Spark's own configuration."""
    conf: Annotated[
        dict[Annotated[str, AfterValidator(_check_property)], str | int | float | SecretSpec],
        AfterValidator(_check_not_clear),
    ] = {}
    """Properties of Spark, such as `spark.executor.memory: 4g`. A secret has the source of its value, such as
    `spark.authenticate.secret: {env: SPARK_SECRET}` or `{file: path}`."""
    python: Annotated[str, Field(min_length=1)] | None = None
    """The Python of the executors that has tfdist; by default the path of the Python that runs `tfdist`."""
    address: Annotated[str, Field(min_length=1)] | None = None
    """The name or address of this machine to which the executors connect. By default `spark.driver.host`, or the
    address from which the master is reached."""
    session: PathField | None = None
    """The Unix socket of a program on this machine in whose SparkSession the tasks run: `tfdist.spark.fit` sets it.
    `master_url`, `conf` and `python` then have no effect. By default tfdist submits an application of its own."""
    slots_seconds: Annotated[int, Field(ge=1)] = 60
    """Seconds in which Spark has to have a free slot for each task."""
    wait_seconds: Annotated[int, Field(ge=1)] = 300
    """Seconds in which the tasks' agents have to connect from their slots."""

    @property
    def secrets(self) -> Mapping[str, SecretSpec]:
        """The properties whose values are read when the application starts."""
        return {name: value for name, value in self.conf.items() if isinstance(value, SecretSpec)}


class RaySpec(SpecModel):
    """How the tasks run in Ray."""

    address: Annotated[str, Field(min_length=1)] = "auto"
    """The Ray cluster: `HOST:PORT` of its head node, `ray://HOST:PORT` of a Ray Client server, or `auto` for that of
    this machine."""
    placement: Literal["pack", "spread", "strict_pack", "strict_spread"] = "pack"
    """The strategy of the placement group: `pack`, few nodes; `spread`, many nodes; the strict forms allow no
    exception."""
    launcher_address: Annotated[str, Field(min_length=1)] | None = None
    """The name or address of this machine to which the nodes connect. By default the address from which the head node
    is reached."""
    wait_seconds: Annotated[int, Field(ge=1)] = 300
    """Seconds in which Ray has to place all tasks."""
