"""What is written is read back as it was."""

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfdist_cli.spec.address import Address
from tfdist_cli.spec.loading import load, positions
from tfdist_cli.spec.loading.dump import dump
from tfdist_cli.spec.loading.load import load_cluster, load_recipe
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Checkpoint, Evaluate, Export, Recipe, Train
from tfdist_cli.spec.sections.role_spec import Roles, RoleSpec

TRICKY = st.sampled_from(
    [
        *(
            "",
            "on",
            "null",
            "~",
            "5",
            "1e-3",
            "0x1f",
            "0o7",
            "10:2222",
            "2024-01-01",
            "<<",
            "=",
            "---",
            "...",
            "a" * 200,
        ),
        *("a: b", "- a", "#", "a #b", "'", '"', "{", "[a]", "&a", "*a", "!a", "|", ">", "%", "@", "`", "? a"),
        *(
            "${N}",
            "$$",
            "a$",
            " a ",
            "a\n",
            "\n",
            "a\n\n b\n",
            "\t",
            "\x85",
            "\u2028",
            "\ufeff",
            "\x00",
            "\x1b[0m",
            "é",
            "😀",
        ),
    ]
)
TEXT = st.one_of(TRICKY, st.text())
PARAMS = st.dictionaries(
    TEXT,
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(-(2**200), 2**200), st.floats(allow_nan=False), TEXT),
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
        max_leaves=12,
    ),
    max_size=5,
)
COUNT = st.integers(1, 10**6)
RECIPES = st.builds(
    Recipe,
    module=st.just("a.b"),
    params=PARAMS,
    train=st.builds(
        Train,
        epochs=st.none() | COUNT,
        steps_per_epoch=st.just("auto") | COUNT,
        repeat=st.booleans(),
        class_weight=st.none() | st.dictionaries(st.integers(0, 99), st.floats(0, 9), max_size=3),
    ),
    checkpoint=st.none() | st.builds(Checkpoint, every_seconds=st.floats(1e-9, 1e9), dir=st.just(Path("/a b/$c"))),
    evaluate=st.none() | st.builds(Evaluate, split=TEXT, every_epochs=st.none() | COUNT),
    export=st.none() | st.builds(Export, format=st.sampled_from(["keras", ["keras", "saved_model"]])),
    module_dir=st.just(Path("/x: y/#z")),
)
ENV = st.dictionaries(
    st.from_regex(r"[^=\x00\ud800-\udfff]+", fullmatch=True), TEXT.filter(lambda text: "\0" not in text), max_size=3
)


@pytest.fixture(params=["CSafeLoader", "SafeLoader"], autouse=True)
def parser(request, monkeypatch):
    monkeypatch.setattr(positions, "_Loader", getattr(yaml, request.param))


@settings(suppress_health_check=list(HealthCheck), max_examples=30)
@given(recipe=RECIPES)
def test_a_recipe_comes_back(tmp_path, recipe):
    path = tmp_path / "r.yaml"
    path.write_text(dump(recipe))
    assert load_recipe(path, (), {}) == recipe


@settings(suppress_health_check=list(HealthCheck))
@given(
    name=st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="/"), min_size=1, max_size=100).filter(
        lambda name: name not in (".", "..", "latest")
    ),
    env=ENV,
    replicas=st.integers(1, 9),
)
def test_a_cluster_comes_back(tmp_path, name, env, replicas):
    roles = Roles(
        chief=RoleSpec(env=env, hosts=[Address("::1", 5)]),
        worker=RoleSpec(
            hosts=[Address("localhost", 1000 + index) for index in range(replicas)], gpus=0, gpu_memory=0.5
        ),
        ps=RoleSpec.model_validate({"replicas": replicas, "cpus": 2, "memory": "4GiB", "threads": {"inter": 2}}),
    )
    cluster = Cluster(name=name, strategy="parameter_server", roles=roles, recipe=Path("/r/${x}.yaml"))
    path = tmp_path / "c.yaml"
    path.write_text(dump(cluster))
    assert load_cluster(path, (), {}) == cluster


def load_run(*args):
    return load.load_run(*args)


def test_a_loaded_run_comes_back_from_anywhere(folder, tmp_path, monkeypatch):
    (folder / "recipes" / "recipe.yaml").write_text(
        "module: digits\nparams: {nan: .nan}\ncheckpoint: {every_steps: 5, dir: ck}\n"
    )
    cluster, recipe = load_run("cluster.yaml", "recipes/recipe.yaml", ["run_dir=runs"])
    away = tmp_path / "away"
    away.mkdir()
    (away / "cluster.yaml").write_text(dump(cluster))
    (away / "recipe.yaml").write_text(dump(recipe))
    monkeypatch.chdir("/")
    assert load_cluster(away / "cluster.yaml") == cluster
    again = load_recipe(away / "recipe.yaml")
    assert str(again.params["nan"]) == "nan"
    assert again.model_copy(update={"params": {}}) == recipe.model_copy(update={"params": {}})


def test_it_is_yaml_for_people(folder):
    assert dump(load_cluster("cluster.yaml", ["roles.ps.env={PATH: '$HOME'}"])) == (
        "name: cluster\nstrategy: parameter_server\nlauncher: local\nroles:\n  chief: {}\n"
        "  worker: {replicas: 3}\n  ps:\n    replicas: 2\n    env: {PATH: $$HOME}\n"
    )
