"""Recipes in storage services: the folder of the recipe's file is fetched, with the recipe's module in it.

A run keeps the content with which it has begun: in its `recipe.yaml` the address and the SHA-256, and in `recipe/` the
files. A later launch of the run uses that content, whatever the service has by then.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from tfdist_cli.errors import InvalidValue, TfdistError
from tfdist_cli.plan.plan import RECIPE_FILE
from tfdist_cli.plan.warnings import PlanWarning
from tfdist_cli.spec import recipe_files
from tfdist_cli.spec.loading.load import load_recipe
from tfdist_cli.spec.path_scheme import Location, Url
from tfdist_cli.spec.recipe_files import KEPT, MOST_BYTES, MOST_FILES, belongs, content_of
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.storage.remote import RemoteFolder
from tfdist_cli.storage.retry import Retry

CONTENT = "TFDIST_RECIPE_SHA256"
"""Environment variable: the content of the recipe's folder that a task has fetched before it became its program."""
_MIB = 1 << 20


class RecipeFetcher:
    """Fetches the folders of recipes; see `spec.loading.load.Fetch`.

    Args:
        run: the run directory, or its address, whose earlier content is used; None for a new run.
    """

    def __init__(self, run: Location | None = None) -> None:
        self._run = run
        self.warnings: list[PlanWarning] = []
        """What is to be told about the folders that were fetched."""

    def __call__(self, folder: Url, sha256: str | None) -> Path:
        """Returns a folder of this machine, named by its content, with the files of a folder in a service.

        Args:
            folder: the address.
            sha256: the content that it must have; None for any.

        Raises:
            InvalidValue: it cannot be fetched, it is too large, or it has another content.
            UsageError: the library for this service is not installed.
        """
        begun = self._begun_with(folder)
        wanted = sha256 or os.environ.get(CONTENT) or begun
        found = recipe_files.find(wanted) if wanted else None
        if found is None and wanted and wanted == begun:
            found = self._copy_of_run(wanted)
        if found is None:
            found = _kept(_fetch(RemoteFolder(folder), folder))
            if wanted and found.name != wanted:
                raise InvalidValue(
                    f"the files in {folder} have changed: their SHA-256 is {found.name}, and not {wanted}",
                    code="recipe-changed",
                )
        if begun and CONTENT not in os.environ:
            self._compare(folder, begun, found.name)
        return found

    def _begun_with(self, folder: Url) -> str | None:
        """Returns the content with which the run has begun; None if it has not, or with a recipe of another folder."""
        with suppress(TfdistError, OSError):
            source = _recipe_of(self._run).source if self._run else None
            return source.sha256 if source and source.address.parent == folder else None
        return None

    def _copy_of_run(self, sha256: str) -> Path | None:
        """Returns the files that the run has kept; None if it has not kept them."""
        with suppress(OSError, TfdistError):
            if isinstance(self._run, Url):
                files = _fetch(RemoteFolder(self._run / KEPT), self._run)
            else:
                files = recipe_files.read_files(Path(self._run or "") / KEPT)
            return _kept(files) if content_of(files) == sha256 else None
        return None

    def _compare(self, folder: Url, begun: str, used: str) -> None:
        """Warns if the service has other files than those with which the run has begun."""
        now = used
        if used == begun:
            with suppress(OSError, TfdistError, InvalidValue):  # the run needs the service for nothing else
                now = content_of(_fetch(RemoteFolder(folder, Retry(0)), folder))
        if now != begun:
            self.warnings.append(
                PlanWarning(
                    code="recipe-changed",
                    message=f"the files in {folder} have changed since the run began, from SHA-256 {begun[:12]}… to "
                    f"{now[:12]}…: this launch uses {used[:12]}…",
                    hint="use another --run-dir for a training with the new files",
                )
            )


def recipe_of_copy(recipe: Recipe, run: Path) -> Recipe:
    """Returns the recipe of a run whose files are on this machine, if the run or this machine has kept them.

    Args:
        recipe: the recipe of the run directory.
        run: the run directory, or a copy of its `recipe.yaml` and its folder `recipe`.
    """
    if recipe.source is None or recipe.module_dir is None or recipe.module_dir.is_dir():
        return recipe
    sha256 = recipe.source.sha256
    folder = recipe_files.find(sha256)
    with suppress(OSError):
        files = recipe_files.read_files(run / KEPT)
        folder = folder or (recipe_files.keep(files) if content_of(files) == sha256 else None)
    if folder is None:
        return recipe
    below = str(recipe.module_dir).partition(sha256)[2].strip("/")
    return recipe.model_copy(update={"module_dir": folder / below})


def _recipe_of(run: Location) -> Recipe:
    """Reads the recipe of a run.

    Raises:
        TfdistError, OSError: there is none.
    """
    if isinstance(run, Path):
        return load_recipe(run / RECIPE_FILE)
    with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
        path = Path(folder, RECIPE_FILE)
        path.write_bytes(RemoteFolder(run).read(RECIPE_FILE))
        return load_recipe(path)


def _fetch(remote: RemoteFolder, shown: Url) -> recipe_files.Files:
    """Downloads the files of a folder.

    Raises:
        InvalidValue: there are none, or too many, or the service cannot be used.
    """
    try:
        sizes = {name: size for name, size in remote.sizes().items() if belongs(name)}
        _check_size(sizes, shown)
        return {name: remote.read(name) for name in sizes}
    except FileNotFoundError as error:
        raise InvalidValue(f"no such file in the service: {error.strerror or error}", code="no-such-file") from error
    except OSError as error:
        message = f"{shown} cannot be read: {error.strerror or error}"
        raise InvalidValue(message, code="storage-unreachable") from error


def _check_size(sizes: dict[str, int], shown: Url) -> None:
    total = sum(sizes.values())
    if not sizes:
        raise InvalidValue(f"there are no files in {shown}", code="no-such-file")
    if total > MOST_BYTES or len(sizes) > MOST_FILES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise InvalidValue(
            f"the recipe's folder {shown} has {len(sizes)} files, {total / _MIB:.1f} MiB, the largest is {largest}. "
            f"At most {MOST_FILES} files with {MOST_BYTES // _MIB} MiB are fetched: put the recipe and its module into "
            "a folder of their own",
            code="recipe-too-large",
        )


def _kept(files: recipe_files.Files) -> Path:
    try:
        return recipe_files.keep(files)
    except OSError as error:
        message = f"{error.filename} cannot be written: {error.strerror}; XDG_CACHE_HOME names another folder"
        raise InvalidValue(message, code="cache-not-writable") from error
