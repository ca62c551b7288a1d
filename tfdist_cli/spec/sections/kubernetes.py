"""The cluster file's `kubernetes`: the pods of the tasks, and the kind of job that runs them."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from tfdist_cli.errors import InvalidValue
from tfdist_cli.spec.sections.compose import check_image
from tfdist_cli.spec.sections.model import Inconsistent, KeyProblem, SpecModel

Kind = Literal["jobset", "tfjob", "plain", "pods"]
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def _check_object(name: str) -> str:
    if not _NAME.fullmatch(name):
        message = f"{name!r} cannot be a name in Kubernetes: lower-case letters, digits, '-' and '.' only"
        raise InvalidValue(message, code="invalid-name")
    return name


def _check_selector(selector: dict[str, str]) -> dict[str, str]:
    for key, value in selector.items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            raise InvalidValue(f"{key!r}: {value!r} cannot be a label of a node", code="invalid-label")
    return selector


def _check_claim(volume: str) -> str:
    name, _, rest = volume.partition(":")
    target, colon, mode = rest.partition(":")
    if not volume.isprintable() or not PurePosixPath(target).is_absolute() or (colon and mode != "ro"):
        message = f"{volume!r} is not a volume: expected 'CLAIM:/path' or 'CLAIM:/path:ro'"
        raise InvalidValue(message, code="invalid-volume")
    _check_object(name)
    return volume


ObjectName = Annotated[str, AfterValidator(_check_object)]
Claim = Annotated[str, AfterValidator(_check_claim)]


class Toleration(SpecModel):
    """A toleration of the pods, with the fields of Kubernetes."""

    key: str | None = None
    """The taint's key; by default any."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """Whether the value must be equal, or the key must exist."""
    value: str | None = None
    """The taint's value."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect; by default any."""

    @model_validator(mode="after")
    def _says_what(self) -> Toleration:
        if self.operator == "Equal" and self.key is None:
            raise Inconsistent([KeyProblem(("key",), "needs a key, or 'operator: Exists'", code="missing-key")])
        if self.operator == "Exists" and self.value is not None:
            raise Inconsistent(
                [KeyProblem(("value",), "'operator: Exists' takes no value: remove it", code="not-used")]
            )
        return self


class Kubernetes(SpecModel):
    """Settings of the pods of `launcher: kubernetes`."""

    kind: Kind = "jobset"
    """The kind of job: a `jobset`, a Kubeflow `tfjob`, or `plain` Jobs, which need no operator. `pods` are started by
    `tfdist launch`, and deleted when it exits."""
    image: Annotated[str, AfterValidator(check_image), Field(json_schema_extra={"minLength": 1})] = "tfdist"
    """The image of every task, which must contain tfdist."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When a node pulls the image; by default Kubernetes decides."""
    image_pull_secrets: list[ObjectName] = []
    """Secrets for the image's registry."""
    namespace: ObjectName | None = None
    """The namespace; by default that of kubectl's current context."""
    service_account: ObjectName | None = None
    """The pods' service account. Its token is not mounted."""
    claim: ObjectName | None = None
    """The PersistentVolumeClaim for run directories, which all pods can write to. Without it, runs are lost with the
    pods."""
    volumes: list[Claim] = []
    """Further claims to mount, `CLAIM:/path` or `CLAIM:/path:ro`."""
    secret: ObjectName | None = None
    """The Secret with the values of the roles' `secrets`, by the names of their variables."""
    node_selector: Annotated[dict[str, str], AfterValidator(_check_selector)] = {}
    """Labels of the nodes that the pods may run on."""
    tolerations: list[Toleration] = []
    """Tolerations of the pods."""
    ttl_seconds: Annotated[int, Field(ge=0)] = 86_400
    """Seconds after the end of the job until Kubernetes deletes it."""
