"""The check of a recipe's model and data in one process."""

import sys
import textwrap

import pytest

from tfdist_cli.protocol.check_report import ReportWriter, read_report
from tfdist_cli.spec.loading.load import load_run
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.task.check.stages import RecipeCheck

pytestmark = pytest.mark.slow

HEAD = """
import keras
import numpy as np
import tensorflow as tf

def compiled(model, optimizer="adam", loss="mse", **more):
    model.compile(optimizer, loss, **more)
    return model

def model(params):
    return compiled(keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)]))

X = np.random.default_rng(0).random((96, 4), np.float32)

def dataset(params, split, shard):
    return tf.data.Dataset.from_tensor_slices((X, X[:, :1])).shard(shard.count, shard.index)
"""
ROLES = {
    "parameter_server": "{chief: {}, ps: {replicas: 2}, worker: {replicas: 2}}",
    "multi_worker_mirrored": "{worker: {replicas: 2}}",
    "model_parallel": "{chief: {}, worker: {replicas: 2}}",
    "single": "{chief: {}}",
}


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Checks a module on a cluster; returns the report."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def of(code="", *overrides, strategy="parameter_server", tasks=()):
        name = f"checked_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{name}.py").write_text(HEAD + textwrap.dedent(code))
        (tmp_path / "recipe.yaml").write_text(f"module: {name}\ntrain: {{batch_size: 8}}\n")
        path = tmp_path / "cluster.yaml"
        path.write_text(f"strategy: {strategy}\nroles: {ROLES[strategy]}\nrecipe: recipe.yaml\n")
        sys.modules.pop(name, None)
        cluster, recipe = load_run(path, None, overrides)
        assert recipe is not None
        (tmp_path / "report").unlink(missing_ok=True)
        writer = ReportWriter(tmp_path / "report")
        RecipeCheck(cluster, recipe, tmp_path, writer, [TaskId.parse(task) for task in tasks]).run()
        return read_report(tmp_path / "report")

    return of


def line_of(text, path):
    return next(n for n, line in enumerate(path.read_text().splitlines(), 1) if text in line)


@pytest.mark.rotates(5)
@pytest.mark.parametrize("strategy", ROLES)
def test_a_recipe_without_problems(check, strategy):
    report = check(strategy=strategy)
    assert not report.findings
    assert (report.facts["model"]["parameters"], report.facts["model"]["weights_bytes"]) == (4 * 3 + 3 + 3 + 1, 76)
    workers = 1 if strategy in {"single", "model_parallel"} else 2
    assert report.facts["shards"] == {"count": workers, "examples": [96 // workers] * workers}
    steps = 6 if strategy == "multi_worker_mirrored" else 12
    assert report.facts["data"]["steps_per_epoch"] == steps
    network = {
        "parameter_server": {"pulled_bytes": 76, "pushed_bytes": 76, "tables_by_rows": 0, "at_most": False},
        "multi_worker_mirrored": {"reduced_bytes": 76},
        "model_parallel": {"reduced_bytes": 0},
        "single": {"reduced_bytes": 0},
    }
    assert report.facts["network"] == network[strategy]
    assert report.facts["step"]["loss"] > 0


@pytest.mark.parametrize("strategy", ["parameter_server", "multi_worker_mirrored"])
def test_data_of_unknown_length(check, strategy):
    report = check(
        """
        def dataset(params, split, shard):
            data = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).filter(lambda x, y: True)
            return data.shard(shard.count, shard.index)
        """,
        strategy=strategy,
    )
    assert not report.findings
    assert (report.facts["data"]["steps_per_epoch"], report.facts["data"]["steps"]) == (None, None)


def test_the_bytes_of_each_task(check):
    facts = check().facts
    tasks = {name: values["variables_bytes"] for name, values in facts.items() if name.startswith("task ")}
    metrics = 8
    assert sum(tasks.values()) == pytest.approx(76 + facts["model"]["slots_bytes"] + metrics, abs=16)
    assert not tasks["task worker:0"]
    assert all(facts[name]["memory_bytes"] > 10**7 for name in tasks)


def test_layers_are_divided_among_the_workers_that_hold_them(check):
    report = check(strategy="model_parallel")
    held = [report.facts[f"task worker:{number}"]["variables_bytes"] for number in range(2)]
    assert held[0] / held[1] == pytest.approx(15 / 4, rel=0.1)
    one_layer = """
        def model(params):
            return compiled(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
        """
    assert [each.code for each in check(one_layer, strategy="model_parallel").findings] == ["model-not-splittable"]


MISTAKES = {
    "shard-ignored": "def dataset(params, split, shard):\n    return tf.data.Dataset.from_tensor_slices((X, X[:, :1]))",
    "same-examples": """
        def dataset(params, split, shard):
            shard.index
            return tf.data.Dataset.from_tensor_slices((X, X[:, :1]))
        """,
    "empty-shard": """
        def dataset(params, split, shard):
            return tf.data.Dataset.from_tensor_slices((X[:1], X[:1, :1])).shard(shard.count, shard.index)
        """,
    "batched-twice": """
        def dataset(params, split, shard):
            return tf.data.Dataset.from_tensor_slices((X, X[:, :1])).shard(shard.count, shard.index).batch(8).batch(2)
        """,
    "batch-size-without-arrays": """
        def dataset(params, split, shard):
            return tf.data.Dataset.from_tensor_slices((X, X[:, :1])).shard(shard.count, shard.index).batch(4)
        """,
    "not-a-dataset": "def dataset(params, split, shard):\n    return 3",
    "model-not-compiled": "def model(params):\n    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])",
    "shape-does-not-fit": """
        def model(params):
            return compiled(keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)]))
        """,
    "not-a-keras-model": "def model(params):\n    return 3",
    "no-targets": """
        def dataset(params, split, shard):
            return tf.data.Dataset.from_tensor_slices(X).shard(shard.count, shard.index)
        """,
    "label-out-of-range": """
        def model(params):
            classifier = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
            return compiled(classifier, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        def dataset(params, split, shard):
            y = np.arange(96) % 3
            return tf.data.Dataset.from_tensor_slices((X, y)).shard(shard.count, shard.index)
        """,
    "loss-not-finite": "X[:] = np.nan",
    "accumulation-needs-synchronous-workers": """
        def model(params):
            one = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            return compiled(one, keras.optimizers.SGD(gradient_accumulation_steps=2))
        """,
    "gradient-lost": """
        class Own(keras.layers.Layer):
            def build(self, shape):
                self.w = self.add_weight(shape=(shape[-1], 1)).value
            def call(self, x):
                return tf.matmul(x, self.w)
        def model(params):
            return compiled(keras.Sequential([keras.Input((4,)), Own()]))
        """,
}


@pytest.mark.parametrize("code", MISTAKES)
def test_a_mistake_is_found_at_its_function(check, code, tmp_path):
    overrides = ["train.batch_size=32"] if code == "batched-twice" else []  # as if the recipe had no such key
    found = [each for each in check(MISTAKES[code], *overrides).findings if each.level == "error"]
    assert [each.code for each in found] == [code]
    path, _, line = found[0].place.rpartition(":")
    written = (tmp_path / path).read_text().splitlines()
    assert written[int(line) - 1].startswith("def ")


def test_an_error_of_the_users_code_has_its_line(check, tmp_path):
    (finding,) = check("def model(params):\n    return params['units']  # the line\n").findings
    assert (finding.code, finding.level) == ("recipe-failed", "error")
    path, _, line = finding.place.rpartition(":")
    assert int(line) == line_of("# the line", tmp_path / path)


def test_an_error_at_the_import_has_its_line(check, tmp_path):
    (finding,) = check("1 / 0  # the line\n").findings
    assert finding.code == "recipe-failed"
    path, _, line = finding.place.rpartition(":")
    assert int(line) == line_of("# the line", tmp_path / path)


def test_validation_is_checked_too(check):
    code = """
        def dataset(params, split, shard):
            data = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).shard(shard.count, shard.index)
            return data if split == "train" else data.repeat()
    """
    assert [each.code for each in check(code).findings] == ["endless-evaluation-data"]
    assert not check(code, "evaluate=null").findings


TABLES = """
    def model(params):
        ids = keras.Input((2,), dtype="int32")
        table = keras.layers.Embedding(10_000, 8, embeddings_constraint={constraint})
        out = keras.layers.Dense(1)(keras.layers.Flatten()(table(ids)))
        return compiled(keras.Model(ids, out), {optimizer})
    def dataset(params, split, shard):
        ids = np.random.default_rng(1).integers(0, 50, (96, 2))
        return tf.data.Dataset.from_tensor_slices((ids, X[:, :1])).shard(shard.count, shard.index)
"""


@pytest.mark.parametrize(
    ("constraint", "optimizer"),
    [("None", "'adagrad'"), ("'non_neg'", "'adagrad'"), ("None", "keras.optimizers.Nadam()")],
)
def test_tables_that_are_fetched_completely(check, constraint, optimizer):
    report = check(TABLES.format(constraint=constraint, optimizer=optimizer), "embeddings.min_bytes=1000")
    by_rows = constraint == "None" and optimizer == "'adagrad'"
    assert [each.code for each in report.findings] == ([] if by_rows else ["table-fetched-completely"])
    network = report.facts["network"]
    assert network["tables_by_rows"] == by_rows
    assert (network["pulled_bytes"] < 1000) == by_rows


RECOMMENDER = """
    def model(params):
        user, item = keras.Input((2,), dtype="int32", name="user"), keras.Input((2,), dtype="int32", name="item")
        rows = [keras.layers.Embedding(10_000, 8)(user), keras.layers.Embedding(100, 8)(item)]
        out = keras.layers.Dense(1)(keras.layers.Flatten()(keras.layers.Concatenate()(rows)))
        return compiled(keras.Model({"user": user, "item": item}, out))
    def dataset(params, split, shard):
        ids = np.stack([np.arange(1, 97), np.zeros(96, np.int32)], axis=1)
        data = tf.data.Dataset.from_tensor_slices(({"user": ids, "item": ids}, X[:, :1]))
        return data.shard(shard.count, shard.index)
"""
DISTINCT = 9
"""Rows of each table that a batch of 8 examples looks up: one of its own for each, and row 0, which all share."""
ROW, SMALL, DENSE = 8 * 4, 100 * 8 * 4, 33 * 4
"""Bytes of a row, of the small table and of the dense layer."""


@pytest.mark.parametrize(
    ("changes", "pulled", "pushed"),
    [
        # With the gradients cross the numbers of the rows, and the sums of squares of both tables.
        ([], DISTINCT * ROW + SMALL + DENSE, 2 * DISTINCT * ROW + DISTINCT * 4 + 2 * SMALL + DENSE),
        # Parameters and Adam's two slots cross once in 10 steps; with the rows of the slots cross how many there are.
        (
            ["updates.local_steps=10"],
            3 * DISTINCT * ROW + 3 * (SMALL + DENSE) // 10,
            3 * DISTINCT * (ROW + 4) + (3 * (SMALL + DENSE) + 2 * 4) // 10,
        ),
    ],
)
def test_a_worker_s_bytes_are_those_of_its_training(check, changes, pulled, pushed):
    network = check(RECOMMENDER, "embeddings.min_bytes=10000", *changes).facts["network"]
    assert (network["pulled_bytes"], network["pushed_bytes"]) == (pulled, pushed)
    assert network["at_most"] == bool(changes)


@pytest.mark.parametrize(
    ("changes", "large"),
    [
        ([], (DISTINCT + 1) * (ROW + 4)),  # row 0 is looked up several times: its squares are summed
        (["communication=ring"], 2 * 10_000 * ROW),
        (["wire=float16"], (DISTINCT + 1) * (ROW // 2 + 4) - 3 * SMALL // 2 + SMALL - DENSE // 2),
    ],
)
def test_a_mirrored_worker_s_bytes_are_those_of_its_training(check, changes, large):
    changed = ["embeddings.min_bytes=10000", *changes]
    network = check(RECOMMENDER, *changed, strategy="multi_worker_mirrored").facts["network"]
    assert network["reduced_bytes"] == large + 2 * SMALL + DENSE


def test_tables_of_keras_rs_are_fetched_by_rows_and_do_not_use_their_own_optimizer(check):
    pytest.importorskip("keras_rs")
    layer = """import keras_rs.layers as rs
TABLE = rs.TableConfig("table", 10_000, 8, optimizer="sgd")
LAYER = lambda: rs.DistributedEmbedding(rs.FeatureConfig("ids", TABLE, (None, 2), (None, 8)))
"""
    code = TABLES.format(constraint="None", optimizer="'adagrad'")
    code = code.replace("keras.layers.Embedding(10_000, 8, embeddings_constraint=None)", "LAYER()")
    report = check(layer + textwrap.dedent(code), "embeddings.min_bytes=1000")
    assert [each.code for each in report.findings] == ["table-optimizer-not-used"]
    assert report.facts["network"]["tables_by_rows"] == 1
    assert report.facts["network"]["pulled_bytes"] < 1000


def test_the_data_of_a_task_alone(check):
    report = check(tasks=["worker:1"])
    assert report.facts["shards"] == {"count": 2, "examples": [48]}


def test_data_of_data_workers(check, tmp_path):
    roles = "roles={chief: {}, ps: {}, worker: {replicas: 2}, data_dispatcher: {}, data_worker: {}}"
    report = check("", roles, "train.share=service")
    assert not report.findings
    assert report.facts["shards"]["count"] == 1


def test_a_worker_needs_no_memory_for_a_table(check):
    code = TABLES.format(constraint="None", optimizer="'adagrad'").replace("10_000", "4_000_000")
    facts = check(code, "embeddings.min_bytes=1000").facts
    assert facts["model"]["weights_bytes"] > 128 * 10**6
    assert facts["task worker:0"]["memory_bytes"] - facts["task worker:0"]["base_bytes"] < 100 * 10**6
    assert facts["task ps:0"]["memory_bytes"] - facts["task ps:0"]["base_bytes"] > 128 * 10**6


def test_many_workers_draw_some_shards(check):
    code = """
        def dataset(params, split, shard):
            return tf.data.Dataset.range(10**6).shard(shard.count, shard.index).map(
                lambda n: (tf.fill([4], tf.cast(n, tf.float32)), tf.zeros([1])))
    """
    report = check(code, "roles.worker.replicas=40", "evaluate=null")
    assert not report.findings
    assert (report.facts["shards"]["count"], len(report.facts["shards"]["examples"])) == (40, 16)
