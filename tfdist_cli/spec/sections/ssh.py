"""The hosts of a cluster, and what the ssh launcher is to know: the cluster file's `hosts` and `ssh`."""

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
    """A machine that takes tasks of the ssh launcher."""

    address: HostName
    """What `ssh` is given: a name, an IP address, or a `Host` of ~/.ssh/config."""
    port: SshPort | None = None
    """The port of its ssh server; by default what ~/.ssh/config says, or 22."""
    user: UserName | None = None
    """The user there; by default that of `ssh`."""
    slots: Annotated[int, Field(ge=1)] | None = None
    """The most tasks that compute (workers, ps, data workers) to put there, and its weight beside other hosts; by
    default there is no bound, and hosts are alike, or weigh what they have `cpus`."""
    cpus: Annotated[int, Field(ge=1)] | None = None
    """The cores that its tasks with `cpus` may have all together; by default there is no bound."""
    gpus: Annotated[int, Field(ge=0)] | None = None
    """The GPUs that its tasks with `gpus` may have all together; by default there is no bound."""
    python: Python | None = None
    """The Python that runs the tasks there, with tfdist in it; by default that of `ssh`."""
    reachable_as: HostName | None = None
    """The name or IP address by which the other hosts reach it; by default the IP address that ssh comes to."""


class SshSpec(SpecModel):
    """What holds for all hosts of the ssh launcher."""

    user: UserName | None = None
    """The user on the hosts; by default what ~/.ssh/config says, or this one."""
    config: PathField | None = None
    """A configuration file of ssh in place of ~/.ssh/config, relative to this file."""
    python: Python | None = None
    """The Python on the hosts, a path or a program's name; by default the path of the one here if it is there and has
    tfdist, or else `python3`."""
    shared: bool = False
    """Whether all hosts have the files of this machine under the same paths, as on a shared file system: nothing is
    copied, and the run's directory is the same for all."""
    sync: Annotated[list[PathField], Field(min_length=1)] | None = None
    """Files and folders that are copied to the hosts, relative to this file; by default the recipe's folder, or the
    current one for a program."""
    exclude: list[str] = []
    """What is left out of that, by name or by path, `*.ckpt` or `data/raw/*`; so is what git ignores."""
    to: RemotePath | None = None
    """The folder on the hosts that they are copied to; by default one of its own in ~/.tfdist/sync."""
    run_dir: RemotePath | None = None
    """The folder of run directories on the hosts; by default ~/.tfdist/runs. Where files are shared it is
    where it is here."""
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
