"""Reads the text of a small file, whatever its path names."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from tfdist_cli.spec.loading.problems import Place, Problem, SpecError

LARGEST = 1 << 20


@dataclass(frozen=True)
class Kind:
    """A kind of files.

    Args:
        name: what messages call it.
        suffixes: how names of its files end.
    """

    name: str
    suffixes: tuple[str, ...]


YAML = Kind("YAML", (".yaml", ".yml"))
PYTHON = Kind("Python", (".py",))


def read_text(path: Path, place: Place, kind: Kind = YAML) -> str:
    """Reads a file in UTF-8.

    Args:
        path: the file.
        place: the place that messages name.
        kind: what the file is expected to be. A hint names others of this kind.

    Raises:
        SpecError: there is no such file, or it is not UTF-8 text of at most 1 MiB.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            found = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise _error(place, f"is {found}: expected a {kind.name} file", code="not-a-file", hint=_hint(path, kind))
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except FileNotFoundError:
        if path.is_symlink():
            message = f"is a link to {path.readlink()}, which does not exist"
            raise _error(place, message, code="broken-link") from None
        raise _error(place, "no such file", code="no-such-file", hint=_hint(path, kind)) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _error(place, f"cannot be read: {reason}", code="unreadable-file") from None
    if len(data) > LARGEST:
        message = f"is larger than 1 MiB: expected a {kind.name} file written by hand"
        raise _error(place, message, code="file-too-large")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}"
        raise _error(place, message, code="not-utf-8") from None


def _error(place: Place, message: str, *, code: str, hint: str | None = None) -> SpecError:
    return SpecError([Problem(place, "", message, code)], hint=hint)


def _hint(path: Path, kind: Kind) -> str | None:
    """Suggests the folder's files of a kind."""
    folder = path if path.is_dir() else path.parent
    try:
        names = sorted(file.name for file in folder.iterdir() if file.suffix in kind.suffixes and file.exists())
    except (OSError, ValueError):
        return None
    stems = {Path(name).stem: name for name in names}
    near = get_close_matches(path.stem, stems, n=1)
    if near:
        return f"did you mean {folder / stems[near[0]]}?"
    return f"the {kind.name} files in {folder} are {', '.join(names[:10])}" if names else None
