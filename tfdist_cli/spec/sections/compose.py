"""The cluster file's `compose`: the containers in which `launcher: compose` runs the tasks."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from tfdist_cli.errors import InvalidValue
from tfdist_cli.spec.sections.model import SpecModel

EngineName = Literal["auto", "podman", "docker"]


def check_image(image: str) -> str:
    """Refuses what an engine would take for an option, or could not name an image."""
    if not image or image.startswith("-") or not image.isascii() or not image.isprintable() or " " in image:
        message = f"{image!r} is not the name of an image: expected one such as 'tfdist' or 'registry/tfdist:1.0'"
        raise InvalidValue(message, code="invalid-image")
    return image


def _check_volume(volume: str) -> str:
    source, _, rest = volume.partition(":")
    target, colon, mode = rest.partition(":")
    if not volume.isprintable() or (colon and mode != "ro"):
        message = f"{volume!r} is not a volume: expected 'SOURCE:TARGET' or 'SOURCE:TARGET:ro'"
        raise InvalidValue(message, code="invalid-volume")
    for path in (source, target):
        if not PurePosixPath(path).is_absolute():
            message = f"{volume!r} needs absolute paths, such as '/data:/data:ro', or '${{PWD}}/data:/data'"
            raise InvalidValue(message, code="invalid-volume")
    return volume


Volume = Annotated[str, AfterValidator(_check_volume)]


class Compose(SpecModel):
    """Settings of the containers of `launcher: compose`."""

    image: Annotated[str, AfterValidator(check_image), Field(json_schema_extra={"minLength": 1})] = "tfdist"
    """The image of every task, which must contain tfdist."""
    engine: EngineName = "auto"
    """The program that runs containers: `podman`, `docker`, or the first of them that is on PATH."""
    volumes: list[Volume] = []
    """Folders and files of this machine to mount, `SOURCE:TARGET` or `SOURCE:TARGET:ro`, with absolute paths."""
