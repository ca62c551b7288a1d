"""The cluster file's `hosts` and `ssh`: the machines of the ssh launcher, and its settings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from tfdist_cli.errors import InvalidValue
from tfdist_cli.spec.address import checked_host
from tfdist_cli.spec.sections.model import Inconsistent, KeyProblem, PathField, SpecModel


def _plain(text: str) -> str:
    """A word that `ssh` cannot take for an option, and no shell for several."""
    if text.startswith("-") or not text.isprintable() or any(character.isspace() for character in text):
        raise InvalidValue(f"{text!r} cannot be a user: no '-' in front, no spaces", code="invalid-user")
    return text


def _remote(text: str) -> str:
    """A path on a host, which only the host can look up."""
    if not text.startswith(("/", "~/")) or "\0" in text:
        message = f"{text!r} is not a path on a host: write one that begins with '/' or '~/'"
        raise InvalidValue(message, code="invalid-path")
    return text


def _program(text: str) -> str:
    return _remote(text) if "/" in text or not text else _plain(text)


HostName = Annotated[str, AfterValidator(checked_host)]
SshPort = Annotated[int, Field(ge=1, le=65535)]
UserName = Annotated[str, Field(min_length=1), AfterValidator(_plain)]
RemotePath = Annotated[str, AfterValidator(_remote)]
Python = Annotated[str, Field(min_length=1), AfterValidator(_program)]


class HostSpec(SpecModel):
    """A machine on which the ssh launcher runs tasks."""

    address: HostName
    """The argument of `ssh`: a name, an IP address, or a `Host` of ~/.ssh/config."""
    port: SshPort | None = None
    """The port of its ssh server; by default that in ~/.ssh/config, or 22."""
    user: UserName | None = None
    """The user there; by default that of `ssh`."""
    slots: Annotated[int, Field(ge=1)] | None = None
    """The most computing tasks (workers, ps, data workers) to place there, and the host's weight in the placement. By
    default there is no limit, and the weight is `cpus`, or 1."""
    cpus: Annotated[int, Field(ge=1)] | None = None
    """The limit of the sum of its tasks' `cpus`; by default there is none."""
    gpus: Annotated[int, Field(ge=0)] | None = None
    """The limit of the sum of its tasks' `gpus`; by default there is none."""
    python: Python | None = None
    """The Python that runs the tasks there, with tfdist in it; by default that of `ssh`."""
    reachable_as: HostName | None = None
    """The name or IP address to which the other hosts connect; by default the IP address to which ssh connects."""


class SshSpec(SpecModel):
    """Settings for all hosts of the ssh launcher."""

    user: UserName | None = None
    """The user on the hosts; by default that in ~/.ssh/config, or the current user."""
    config: PathField | None = None
    """A configuration file of ssh to use instead of ~/.ssh/config, relative to this file."""
    python: Python | None = None
    """The Python on the hosts, a path or a program's name. By default the path of the current Python if it exists there
    and has tfdist, otherwise `python3`."""
    shared: bool = False
    """Whether all hosts have this machine's files under the same paths, as on a shared file system. Then nothing is
    copied, and all use the same run directory."""
    sync: Annotated[list[PathField], Field(min_length=1)] | None = None
    """Files and folders to copy to the hosts, relative to this file; by default the recipe's folder, or the current one
    for a program."""
    exclude: list[str] = []
    """Patterns of names or paths that are not copied, such as `*.ckpt` or `data/raw/*`. Files that git ignores are not
    copied either."""
    to: RemotePath | None = None
    """The target folder on the hosts; by default a separate folder in ~/.tfdist/sync."""
    run_dir: RemotePath | None = None
    """The folder of run directories on the hosts; by default ~/.tfdist/runs. With `shared` it is the same as here."""
    versions: Literal["same", "any"] = "same"
    """Whether all hosts must have the same versions of Python, TensorFlow, Keras and tfdist."""

    @model_validator(mode="after")
    def _copies_or_shares(self) -> SshSpec:
        if self.shared:
            given = (name for name in ("sync", "exclude", "to", "run_dir") if getattr(self, name))
            message = "has no effect with 'shared: true', which copies nothing"
            problems = [KeyProblem((name,), message, code="not-used") for name in given]
            if problems:
                raise Inconsistent(problems)
        return self
