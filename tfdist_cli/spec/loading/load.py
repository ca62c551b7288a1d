"""Loads a cluster and a recipe from files, `--set` and environment variables, and checks them."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from tfdist_cli.errors import InvalidValue
from tfdist_cli.spec.loading.dump import dump
from tfdist_cli.spec.loading.explanations import explain
from tfdist_cli.spec.loading.files import read_text
from tfdist_cli.spec.loading.keys import all_paths, location_fields, mapped_models, path_fields, submodels
from tfdist_cli.spec.loading.overrides import Override
from tfdist_cli.spec.loading.positions import Node, Unusable, read_yaml
from tfdist_cli.spec.loading.problems import Place, Problem, SpecError, dotted
from tfdist_cli.spec.path_scheme import Url, checked_location, scheme_problem
from tfdist_cli.spec.roles import Role
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.model import KeyProblem, SpecModel
from tfdist_cli.spec.sections.recipe import Recipe, RecipeSource
from tfdist_cli.spec.strategies import STRATEGIES, may_join

_EXPLAINED_AT_MOST = 1000
"""The most problems of pydantic that are explained: finding the most similar key takes a while."""
Model = TypeVar("Model", bound=SpecModel)
Fetch = Callable[[Url, "str | None"], Path]
"""Fetches a folder of a storage service, which must have a content if one is given: its SHA-256. Returns a folder of
this machine that is named by the content. An `InvalidValue` says why it cannot."""


def load_cluster(path: str | Path, overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Cluster:
    """Reads a cluster file.

    Args:
        path: the file.
        overrides: the values of `--set`, `path=value`.
        environ: the environment variables for `${VAR}`.

    Raises:
        SpecError: the file or an override is invalid. It has all problems.
    """
    return _File(Path(path), str(path), _parse(overrides, environ, (Cluster,)), environ).load(Cluster)[0]


def load_recipe(
    path: str | Path,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    fetch: Fetch | None = None,
) -> Recipe:
    """Reads a recipe file; the arguments and errors are those of `load_run`."""
    parsed, at = _parse(overrides, environ, (Recipe,)), checked_location(path)
    if isinstance(at, Url):
        return _fetched(at, Place(str(at)), parsed, environ, fetch).load_recipe()[0]
    return _File(at, str(path), parsed, environ).load_recipe()[0]


def load_run(
    cluster_path: str | Path,
    recipe_path: str | Path | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    fetch: Fetch | None = None,
) -> tuple[Cluster, Recipe | None]:
    """Reads a cluster and the recipe it trains.

    Args:
        cluster_path: the cluster file.
        recipe_path: the recipe file, in place of the one that the cluster file names.
        overrides: the values of `--set`, `path=value`. The first key of the path decides which file it changes.
        environ: the environment variables for `${VAR}`.
        fetch: fetches the folder of a recipe in a storage service; None to accept no such recipe.

    Returns:
        The cluster, with the path of the recipe that was read, and the recipe if there is one.

    Raises:
        SpecError: a file or an override is invalid. It has all problems of both files.
    """
    parsed = _parse(overrides, environ, (Cluster, Recipe))
    for_cluster = [override for override in parsed if override.path[0] in Cluster.model_fields]
    for_recipe = [override for override in parsed if override not in for_cluster]
    at = None if recipe_path is None else checked_location(recipe_path)
    given = _File(at, str(recipe_path), for_recipe, environ) if isinstance(at, Path) else None
    try:
        cluster, tree = _File(Path(cluster_path), str(cluster_path), for_cluster, environ).load(Cluster)
    except SpecError as error:
        others = given.problems(Recipe) if given else ()
        raise SpecError((*error.problems, *others), hint=error.hint) from None
    if isinstance(at, Url):
        given = _fetched(at, Place(str(at)), for_recipe, environ, fetch, cluster.recipe_sha256)
    file = given or _named_recipe(cluster, tree, for_recipe, environ, fetch)
    if cluster.recipe_sha256 and (file is None or file.source is None):
        message = "is for a recipe in a storage service, and this one is not"
        named = tree.child("recipe_sha256") or tree
        raise SpecError([Problem(named.place, "recipe_sha256", message, code="recipe-not-in-bucket")])
    if file is None:
        message = f"is for a recipe, but there is none: name it with --recipe, or as 'recipe' in {cluster_path}"
        if for_recipe:
            raise SpecError(Problem(override.place, "", message, code="no-recipe") for override in for_recipe)
        return cluster, None
    recipe, _ = file.load_recipe()
    _check_together(cluster, recipe, tree, file.shown)
    return cluster.model_copy(update={"recipe": _absolute(file.path), "recipe_sha256": None}), recipe


def resized(cluster: Cluster, recipe: Recipe | None, replicas: Mapping[Role, int]) -> Cluster:
    """Returns the cluster with other numbers of tasks, as `--set roles.ROLE.replicas=N` would.

    A role with `hosts` whose tasks can leave may have fewer tasks than addresses.

    Args:
        cluster: the cluster.
        recipe: the recipe that it trains.
        replicas: the roles that change, each with its new number of tasks.

    Raises:
        SpecError: a cluster with these numbers is invalid.
    """
    overrides = [Override.parse(f"roles.{role}.replicas={count}", {}) for role, count in replicas.items()]
    overrides += [Override.parse(f"roles.{role}.max={most}", {}) for role, most in _spare(cluster, replicas)]
    tree = read_yaml(dump(cluster), cluster.name, {}, marks=False)
    changed, tree = _File(Path(cluster.name), cluster.name, overrides, {}).check(tree, Cluster)
    if recipe is not None:
        _check_together(changed, recipe, tree, "the recipe")
    return changed


def _spare(cluster: Cluster, replicas: Mapping[Role, int]) -> Iterator[tuple[Role, int]]:
    """The roles that get fewer tasks than the file lists addresses, and the number of these."""
    for role, count in replicas.items():
        spec = cluster.roles.of(role)
        if spec and spec.hosts and spec.max is None and count < len(spec.hosts) and may_join(cluster.strategy, role):
            yield role, len(spec.hosts)


@dataclass(frozen=True)
class _File:
    """A file to load, with the name that messages use, and the overrides for it."""

    path: Path
    shown: str
    overrides: Sequence[Override]
    environ: Mapping[str, str]
    source: RecipeSource | None = None

    def load_recipe(self) -> tuple[Recipe, Node]:
        recipe, tree = self.load(Recipe)
        return (recipe.model_copy(update={"source": self.source}) if self.source else recipe), tree

    def load(self, model: type[Model]) -> tuple[Model, Node]:
        return self.check(read_yaml(read_text(self.path, Place(self.shown)), self.shown, self.environ), model)

    def check(self, tree: Node, model: type[Model]) -> tuple[Model, Node]:
        if not isinstance(tree.content, dict):
            kind = {list: "a list", type(None): "nothing"}.get(type(tree.content), "a single value")
            message = f"expected a map with the keys {', '.join(model.model_fields)}, got {kind}"
            raise SpecError([Problem(tree.place, "", message, code="wrong-type")])
        if self.source:
            _start_at_address(self.source.address.parent, tree, model)
        _start_at(_absolute(self.path).parent, tree, model)
        problems = [problem for override in self.overrides for problem in _apply(override, tree)]
        _start_at(Path(), tree, model)
        _fill_in(tree.content, model, self.path, self.shown)
        problems += tree.problems()
        try:
            loaded = model.model_validate(tree.plain())
        except ValidationError as error:
            problems += islice(explain(error, tree, model), _EXPLAINED_AT_MOST)
        if problems:
            raise SpecError(sorted(problems, key=lambda problem: problem.place), hint=_other_file(tree.content, model))
        return loaded, tree

    def problems(self, model: type[SpecModel]) -> tuple[Problem, ...]:
        try:
            self.load(model)
        except SpecError as error:
            return error.problems
        return ()


def _parse(overrides: Sequence[str], environ: Mapping[str, str], models: Sequence[type[SpecModel]]) -> list[Override]:
    """Parses the overrides of the files of these models."""
    parsed: list[Override] = []
    problems: list[Problem] = []
    for text in overrides:
        try:
            override = Override.parse(text, environ)
        except SpecError as error:
            problems += error.problems
            continue
        parsed.append(override)
        if not any(override.path[0] in model.model_fields for model in models):
            problems.append(Problem(override.place, "", _nearest(override.path, models), code="unknown-key"))
    if problems:
        raise SpecError(problems)
    return parsed


def _apply(override: Override, tree: Node) -> Iterable[Problem]:
    if problem := _unknown_parameter(override, tree):
        return [problem]
    try:
        override.apply(tree)
    except SpecError as error:
        return error.problems
    return ()


def _unknown_parameter(override: Override, tree: Node) -> Problem | None:
    """The problem with a parameter that the recipe does not have. No other check would find a typo in its name."""
    top, *below = override.path
    if top != "params" or not below:
        return None
    params = tree.child(top)
    names = list(params.content) if params and isinstance(params.content, dict) else []
    if below[0] in names:
        return None
    near = get_close_matches(below[0], names, n=1, cutoff=0.5)
    meant = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(names)}"
    message = f"the recipe has no parameter {below[0]!r}, {meant}" if names else "the recipe has no parameters"
    return Problem(override.place, "", message, code="unknown-parameter")


def _nearest(path: tuple[str, ...], models: Sequence[type[SpecModel]]) -> str:
    known = [other for model in models for other in all_paths(model)]
    same_end = [other for other in known if other.rpartition(".")[2] == path[-1]]
    near = same_end if len(same_end) == 1 else get_close_matches(".".join(path), known, n=1, cutoff=0.5)
    tops = [key for model in models for key in model.model_fields]
    meant = f"did you mean {near[0]!r}?" if near else f"expected one that starts with {', '.join(tops)}"
    return f"there is no key {dotted(path)!r}, {meant}"


def _start_at(folder: Path, node: Node, model: type[SpecModel]) -> None:
    """Makes the relative paths among the values absolute, relative to `folder`."""
    for key in path_fields(model):
        for child in _items(node.child(key)):
            if isinstance(child.content, str) and child.content and "\0" not in child.content:
                try:
                    if not scheme_problem(child.content):  # the model reports what is not a path
                        child.content = str(_absolute(folder / Path(child.content).expanduser()))
                except (RuntimeError, OSError) as error:  # no such user, or the current folder is gone
                    child.content = Unusable(f"{child.content!r} is not a path here: {error}", code="invalid-path")
    for key, below in submodels(model).items():
        for child in _items(node.child(key)):
            _start_at(folder, child, below)
    for key, below in mapped_models(model).items():
        entries = node.child(key)
        for each in entries.content.values() if entries and isinstance(entries.content, dict) else ():
            _start_at(folder, each, below)


def _start_at_address(folder: Url, node: Node, model: type[SpecModel]) -> None:
    """Makes the relative paths that may be addresses absolute: `checkpoints` is a folder beside the recipe's file."""
    bucket, _, path = folder.partition("://")[2].partition("/")
    for key in location_fields(model):
        child = node.child(key)
        text = child.content if child else None
        if child and isinstance(text, str) and text and not text.startswith(("/", "~")) and not scheme_problem(text):
            child.content = f"{folder.scheme}://{bucket}{posixpath.normpath(f'/{path}/{text}')}"
    for key, section in submodels(model).items():
        for child in _items(node.child(key)):
            _start_at_address(folder, child, section)


def _items(node: Node | None) -> Sequence[Node]:
    """The items of a list, or the one value."""
    if node is None:
        return ()
    return node.content if isinstance(node.content, list) else (node,)


def _absolute(path: Path) -> Path:
    """Returns an absolute path without `..`, unless removing `..` would change the file because of a symbolic link.

    Links are not resolved: on a cluster the same file system often has different mount points behind one link.
    """
    try:
        path = path.absolute()
    except FileNotFoundError:
        message = "the current directory does not exist any more"
        raise SpecError([Problem(Place(str(path)), "", message, code="no-current-directory")]) from None
    plain = Path(os.path.normpath(path))
    return plain if os.path.realpath(path) == os.path.realpath(plain) else path


def _fill_in(entries: dict[str, Node], model: type[SpecModel], path: Path, shown: str) -> None:
    """Fills in the defaults that depend on the file's name and folder."""
    if model is Cluster:
        stem = path.stem.encode("utf-8", "replace").decode()
        default = "name", re.sub(r"[\x00-\x1f\x7f-\x9f]", "_", stem)[:100]
    else:
        default = "module_dir", str(_absolute(path).parent)
    key, value = default
    if key not in entries or entries[key].content is None:
        entries[key] = Node(value, Place(shown), Place(shown))


def _other_file(entries: Mapping[str, Node], model: type[SpecModel]) -> str | None:
    """A hint if a recipe is given as the cluster, or a cluster as the recipe."""
    other: type[SpecModel] = Recipe if model is Cluster else Cluster
    written = {key for key, node in entries.items() if node.place.line}
    if not written & set(model.model_fields) and written & set(other.model_fields):
        return f"this is a {other.__name__.lower()} file: a {model.__name__.lower()} file is expected"
    return None


def _named_recipe(
    cluster: Cluster, tree: Node, overrides: Sequence[Override], environ: Mapping[str, str], fetch: Fetch | None
) -> _File | None:
    """The recipe that the cluster file names. If it does not exist, the problem is at the line that names it."""
    if cluster.recipe is None:
        return None
    named = tree.child("recipe") or tree
    if isinstance(cluster.recipe, Url):
        return _fetched(cluster.recipe, named.place, overrides, environ, fetch, cluster.recipe_sha256)
    if not os.path.lexists(cluster.recipe):
        raise SpecError([Problem(named.place, "recipe", f"no such file: {cluster.recipe}", code="no-such-file")])
    return _File(cluster.recipe, _shortest(cluster.recipe), overrides, environ)


def _fetched(
    at: Url,
    place: Place,
    overrides: Sequence[Override],
    environ: Mapping[str, str],
    fetch: Fetch | None,
    sha256: str | None = None,
) -> _File:
    """The recipe at an address. Its folder is fetched.

    Raises:
        SpecError: that is not possible, or there is no such file in it.
    """

    def problem(message: str, code: str) -> SpecError:
        return SpecError([Problem(place, "recipe", message, code=code)])

    if fetch is None:
        raise problem(f"{at} is not a path of this machine, which is needed here", "unsupported-scheme")
    try:
        folder = fetch(at.parent, sha256)
    except InvalidValue as error:
        raise problem(str(error), error.code) from error
    path = folder / at.name
    if not path.is_file():
        names = ", ".join(sorted(each.name for each in folder.glob("*.y*ml")))
        raise problem(f"no such file: {at}; the YAML files there are {names or 'none'}", "no-such-file")
    return _File(path, str(at), overrides, environ, RecipeSource(address=at, sha256=folder.name))


def _check_together(cluster: Cluster, recipe: Recipe, tree: Node, recipe_file: str) -> None:
    """Checks that the recipe fits the cluster.

    Raises:
        SpecError: it does not. The problem is at a role of the cluster file.
    """
    for problem in _mismatches(cluster, recipe, recipe_file):
        roles = tree.child("roles") or tree
        named = roles.child(problem.keys[-1])
        place = (named.key_place or named.place) if named else roles.key_place or roles.place
        raise SpecError([Problem(place, dotted(problem.keys), problem.message, problem.code)])


def _mismatches(cluster: Cluster, recipe: Recipe, recipe_file: str) -> Iterator[KeyProblem]:
    """The roles that do not fit the recipe."""
    missing = [key for key in ("checkpoint", "evaluate") if getattr(recipe, key) is None]
    if cluster.roles.count("evaluator") and missing:
        message = f"an evaluator scores checkpoints: it needs {' and '.join(map(repr, missing))} in {recipe_file}"
        yield KeyProblem(("roles", "evaluator"), message, code="nothing-to-evaluate")
    best, patience = recipe.export and recipe.export.best, recipe.evaluate and recipe.evaluate.patience
    if (best or patience) and not cluster.roles.count("evaluator"):
        key = "export.best" if best else "evaluate.patience"
        message = f"{recipe_file} has {key}, which needs an evaluator: write 'evaluator: {{}}' in roles"
        yield KeyProblem(("roles", "evaluator"), message, code="missing-role")
    least, workers = recipe.updates.aggregate, cluster.roles.count("worker")
    if least is not None and least > workers and STRATEGIES[cluster.strategy].has_ps:
        message = f"{recipe_file} has updates.aggregate: {least}, but there are {workers} workers"
        yield KeyProblem(("roles", "worker"), message, code="too-few-workers")
    yield from _stage_mismatches(cluster, recipe, recipe_file)
    share, served = recipe.train.share, cluster.roles.count("data_worker")
    if served and share != "service":
        message = f"no task reads its data: {recipe_file} has train.share: {share}, and not 'service'"
        yield KeyProblem(("roles", "data_worker"), message, code="role-not-used")
    if share == "service" and not served:
        fix = "write 'data_dispatcher: {}' and 'data_worker: {}' in roles"
        message = f"{recipe_file} has train.share: service, which needs data workers: {fix}"
        yield KeyProblem(("roles", "data_worker"), message, code="missing-role")


def _stage_mismatches(cluster: Cluster, recipe: Recipe, recipe_file: str) -> Iterator[KeyProblem]:
    """Stages that do not fit the workers of a cluster."""
    if not STRATEGIES[cluster.strategy].staged:
        return
    workers, stages = cluster.roles.count("worker"), recipe.stage_count(cluster.roles.count("worker"))
    if workers % stages:
        message = f"{recipe_file} has {stages} stages, and {workers} workers are no multiple of them"
        yield KeyProblem(("roles", "worker"), message, code="stages-do-not-fit")


def _shortest(path: Path) -> str:
    """The name in messages of a file that the command line does not name."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)
