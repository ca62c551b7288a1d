"""What the source of a recipe's module shows, without importing it."""

import textwrap

import pytest

from tfdist_cli.check.source import data_findings, function_findings, read_module
from tfdist_cli.finding import Finding

GOOD = """
    def model(params): ...
    def dataset(params, split, shard):
        return make(split).shard(shard.count, shard.index)
"""


@pytest.fixture
def found(tmp_path):
    """Returns the findings of a source: code, level and line of each."""

    def of(text, shards=2):
        path = tmp_path / "recipe.py"
        path.write_text(textwrap.dedent(text))
        source = read_module(path)
        if isinstance(source, Finding):
            findings = [source]
        else:
            findings = [*function_findings(source), *data_findings(source, shards)]
        for finding in findings:
            assert finding.place.startswith(str(path))
        return [(each.code, each.level, each.place.removeprefix(str(path)).strip(":")) for each in findings]

    return of


def test_a_module_without_problems(found):
    assert not found(GOOD)


def test_a_syntax_error_has_its_line(found):
    assert found("def model(params):\n    return (\n") == [("module-syntax-error", "error", "2")]


def test_bytes_that_are_no_python(tmp_path):
    (tmp_path / "recipe.py").write_bytes(b"def model(\0): pass\n")
    assert isinstance(read_module(tmp_path / "recipe.py"), Finding)


@pytest.mark.parametrize(
    "text",
    [
        "from other import model, dataset",
        "from other import build as model, dataset",
        "from other import *",
        "model = dataset = make()",
        "if True:\n    from other import model\ntry:\n    import dataset\nexcept ImportError:\n    pass",
        "def __getattr__(name): ...",
        "globals().update(functions)",
        "class model: ...\ndataset: object = lambda *_: 0",
    ],
)
def test_functions_that_come_from_elsewhere_are_not_missed(found, text):
    assert not found(text)


@pytest.mark.parametrize("text", ["", "def f():\n    def model(params): ...\n    def dataset(a, b, c): ...\n"])
def test_missing_functions(found, text):
    assert found(text) == [("recipe-function-missing", "error", "")] * 2


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("def model(): ...\ndef dataset(params, split): ...", ["1", "2"]),
        ("def model(params, size): ...\ndef dataset(params, split, shard, *, seed): ...", ["1", "2"]),
        ("def model(*args): ...\ndef dataset(params, *rest): ...", []),
        ("def model(params, size=3): ...\ndef dataset(p, s, n=None, *, seed=1):\n    return n", []),
        ("@partial\ndef model(): ...\n@partial\ndef dataset(): ...", []),
        ("from m import model, dataset\ndef callbacks(): ...", ["2"]),
    ],
)
def test_parameters(found, text, lines):
    assert found(text) == [("recipe-function-parameters", "error", line) for line in lines]


def dataset_of(body, more=""):
    return f"{more}\ndef model(params): ...\ndef dataset(params, split, shard):\n    {body}\n"


def test_a_shard_that_is_ignored(found):
    text = dataset_of("return tf.data.Dataset.range(9)")
    assert found(text) == [("shard-ignored", "error", "3")]
    assert not found(text, shards=1)


def test_what_tfdist_divides_needs_no_shard(found):
    assert found(dataset_of("return make(split)")) == [("shard-ignored", "warning", "3")]  # it may be arrays
    assert not found(dataset_of("yield from batches(split)"))


def test_python_code_may_choose_its_shard_later(found):
    text = dataset_of("return tf.data.Dataset.from_generator(rows, types)")
    assert found(text) == [("shard-ignored", "warning", "3")]


@pytest.mark.parametrize(
    "body",
    [
        "return make(split, shard)",
        "return make(**locals())",
        "inner = lambda n: files[shard.index + n]\n    return make(inner)",
        "def rows():\n        yield from files[shard.index :: shard.count]\n    return from_generator(rows)",
    ],
)
def test_a_shard_that_is_used(found, body):
    assert not found(dataset_of(body))
