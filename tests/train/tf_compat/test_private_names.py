"""Private names of TensorFlow and Keras are in `tf_compat` only, each with its version, its reason and a test.

A private name is a module below `tensorflow.python` or `keras.src`, an attribute that starts with an underscore, also
as a string, and `tf.__internal__`. A replaced method counts likewise, whatever its name.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sources import syntax_tree

PACKAGE = Path(__file__).parents[3] / "tfdist_cli"
COMPAT = PACKAGE / "train" / "tf_compat"
TESTS = Path(__file__).parent
PROGRAMS = Path(__file__).parents[2] / "support" / "programs"
SPARK = PACKAGE / "integrations" / "spark"
"""It imports neither TensorFlow nor Keras, and extends pyspark.ml by names that begin with an underscore there."""
OURS = [path for path in sorted(PACKAGE.rglob("*.py")) if not {COMPAT, SPARK} & set(path.parents)]
TRAINING = [path for path in OURS if path.relative_to(PACKAGE).parts[0] in ("train", "task", "datasets")]

PRIVATE_MODULES = ("tensorflow.python", "tensorflow.core", "tensorflow.compiler", "keras.src")
PRIVATE_ATTRIBUTES = {"__internal__", "_api", "python", "src"}
"""Attributes of the modules `tensorflow` and `keras`."""
NOT_PRIVATE = {
    "_exit",  # os._exit is documented: it ends a process whose main thread cannot be interrupted
}
PRIVATE = re.compile(r"_[A-Za-z]\w*")
ACCESSORS = {"getattr", "setattr", "hasattr", "delattr"}


def is_private(name: str) -> bool:
    return bool(PRIVATE.fullmatch(name)) and name not in NOT_PRIVATE


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The modules that code imports, with lines; a name that is imported from a module may be one, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
            yield node.lineno, node.value  # import_module("…")


def root_of(node: ast.AST) -> str:
    """The name that a chain of attributes, subscripts and calls begins with: `tf.data.Dataset` → "tf"."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def own_object(node: ast.AST) -> bool:
    """Whether code accesses the object that its method belongs to."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def text_of(node: ast.AST) -> str:
    """A string, or how a formatted one begins."""
    if isinstance(node, ast.JoinedStr):
        node = node.values[0] if node.values else node
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def libraries(tree: ast.AST) -> set[str]:
    """The names that stand for TensorFlow, Keras or something in them."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
                if full.split(".")[0] in ("tensorflow", "keras"):
                    names.add(alias.asname or alias.name.split(".")[0])
    return names


def patched(node: ast.AST, names: set[str]) -> bool:
    """Whether code replaces an attribute of something in a library, or puts one into the `vars` of an object."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
        return root_of(node.args[0]) in names
    for target in targets:
        if isinstance(target, ast.Attribute | ast.Subscript) and root_of(target) in names:
            return True
        if isinstance(target, ast.Subscript) and root_of(target) == "vars":
            return True
    return False


def own_names(tree: ast.Module) -> set[str]:
    """The names that a module defines, which it may use in strings (`TypeVar("_Result")`), and parts of f-strings."""
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    names |= {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    return names | {text_of(part) for node in formatted for part in node.values}


def private_name(node: ast.AST, names: set[str]) -> str:
    """The private name that a piece of code uses; empty if it uses none."""
    if isinstance(node, ast.Attribute):
        of_library = isinstance(node.value, ast.Name) and node.value.id in names and node.attr in PRIVATE_ATTRIBUTES
        if of_library or node.attr == "__internal__" or (is_private(node.attr) and not own_object(node.value)):
            return node.attr
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ACCESSORS:
        name = text_of(node.args[1]) if len(node.args) > 1 else ""
        if name.startswith("_") and not name.startswith("__") and not own_object(node.args[0]):
            return name
    return "a replaced attribute" if patched(node, names) else ""


def private_names(tree: ast.Module, *, strings: bool = True) -> list[str]:
    """What code uses that is private, as `line: name`."""
    names, own = libraries(tree), own_names(tree)
    found = {
        (line, name)
        for line, name in imported(tree)
        if any(name == module or name.startswith(f"{module}.") for module in PRIVATE_MODULES)
    }
    for node in ast.walk(tree):
        if name := private_name(node, names):
            found.add((getattr(node, "lineno", 0), name))
        elif strings and isinstance(node, ast.Constant) and is_private(text_of(node)) and text_of(node) not in own:
            found.add((node.lineno, text_of(node)))
    return [f"{line}: {name}" for line, name in sorted(found)]


def test_private_names_are_in_tf_compat_only():
    found = {path: private_names(syntax_tree(path), strings=path in TRAINING) for path in OURS}
    assert not {path: names for path, names in found.items() if names}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from tensorflow.python.eager import context", ["1: tensorflow.python.eager.context"]),
        ("from keras import src", ["1: keras.src"]),
        ("import keras.src.losses", ["1: keras.src.losses"]),
        ("import_module('tensorflow.python.eager')", ["1: tensorflow.python.eager"]),
        ("import tensorflow as tf\ntf.__internal__.distribute", ["2: __internal__"]),
        ("import tensorflow as tf\ntf.python.eager", ["2: python"]),
        ("model.optimizer._iterations.value", ["1: _iterations"]),
        ("innermost(model)._iterations", ["1: _iterations"]),
        ("self.model._loss_tracker", ["1: _loss_tracker"]),
        ("getattr(model, '_loss_tracker', None)", ["1: _loss_tracker"]),
        ("getattr(model, f'_{which}_struct')", ["1: _"]),
        ("read = {'_learning_rate': rate}", ["1: _learning_rate"]),
        ("import keras\nkeras.Model.fit = fit", ["2: a replaced attribute"]),
        ("from keras import layers\nsetattr(layers.Dense, name, call)", ["2: a replaced attribute"]),
        ("vars(layer)['call'] = call", ["1: a replaced attribute"]),
        ("self._own = super()._own + cls._other + os._exit(0)", []),
        ("variable.value = model.__class__", []),
    ],
)
def test_the_rule_finds_what_it_should(source, found):
    assert private_names(ast.parse(source)) == found


def test_derived_classes_use_no_private_attribute_of_their_base():
    """`self._name` in a class that derives from one of TensorFlow's or Keras's may be the base's."""
    for path in TRAINING:
        tree = syntax_tree(path)
        names = libraries(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any(root_of(base) in names for base in node.bases):
                module = importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
                used = own_attributes(node) & attributes_of_bases(getattr(module, node.name))
                assert not used, f"{node.name} in {path}"


def own_attributes(node: ast.ClassDef) -> set[str]:
    """The private attributes and methods that a class uses or defines."""
    used = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute) and own_object(each.value)}
    defined = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    return {name for name in used | defined if is_private(name)}


def attributes_of_bases(kind: type) -> set[str]:
    """The private attributes that the classes of libraries which a class derives from have, or set on an object."""
    found: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.split(".")[0] in ("tensorflow", "keras"):
            found |= set(vars(base)) | set(re.findall(r"\bself\.(_[A-Za-z]\w*)", inspect.getsource(base)))
    return found


def test_a_base_s_attributes_are_found():
    keras = pytest.importorskip("keras")
    derived = type("Derived", (keras.Variable,), {})
    assert {"_value", "_dtype", "_initialize"} <= attributes_of_bases(derived)


COMPAT_MODULES = [path for path in sorted(COMPAT.glob("*.py")) if path.stem != "__init__"]


def definitions(path: Path) -> Iterator[tuple[str, str, str]]:
    """Each function, class and documented constant of a module: its name, its docstring, its source."""
    source = path.read_text()
    body = syntax_tree(path).body
    for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        text = ast.get_source_segment(source, node) or ""
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, ast.get_docstring(node) or "", text
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, text_of(after.value) if isinstance(after, ast.Expr) else "", text


def uses_private_names(source: str, imports: set[str]) -> bool:
    """Whether one definition uses a private name; see `private_names`."""
    tree = ast.parse(source)
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    found = {each.split(": ")[1] for each in private_names(tree)}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return bool((found - {"a replaced attribute"}) | (used & imports)) or any(is_private(each) for each in strings)


def private_imports(path: Path) -> set[str]:
    """The names in a module that are imported from private modules."""
    return {
        alias.asname or alias.name
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PRIVATE_MODULES)
        for alias in node.names
    }


def entries() -> list[tuple[Path, str, str]]:
    """The public definitions of `tf_compat` that use private names, or whose docstrings say so."""
    return [
        (path, name, docstring)
        for path in COMPAT_MODULES
        for name, docstring, source in definitions(path)
        if not name.startswith("_") and ("Seen in" in docstring or uses_private_names(source, private_imports(path)))
    ]


ENTRIES = [pytest.param(*entry, id=f"{entry[0].stem}.{entry[1]}") for entry in entries()]


@pytest.mark.parametrize(("path", "name", "docstring"), ENTRIES)
def test_docstrings_say_version_reason_and_replacement(path, name, docstring):
    assert re.search(r"Seen in (TensorFlow|Keras) \d+\.\d+\.\d+", docstring)
    assert "Reason:" in docstring
    assert re.search(r"Replace\s+with:", docstring)


@pytest.mark.parametrize(("path", "name", "docstring"), ENTRIES)
def test_each_entry_has_a_test(path, name, docstring):
    """One that calls it, and so fails when a name in it is gone."""
    tests = [TESTS / f"test_{path.stem}.py", *PROGRAMS.glob("tf_compat_*.py")]
    used = {
        each.attr if isinstance(each, ast.Attribute) else each.id
        for file in tests
        for each in ast.walk(syntax_tree(file))
        if isinstance(each, ast.Name | ast.Attribute)
    }
    assert name in used, f"no test uses {name}"
