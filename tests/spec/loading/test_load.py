"""Loading: defaults, relative paths, `--set`, and the problems of realistic mistakes."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.codes import raises
from tests.support.problems import codes_of, problems_of
from tfdist_cli.errors import ExitCode
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.loading import load
from tfdist_cli.spec.loading.load import resized
from tfdist_cli.spec.loading.problems import SpecError
from tfdist_cli.spec.sections.role_spec import RoleSpec


def load_cluster(*args):
    return load.load_cluster(*args)


def load_recipe(*args):
    return load.load_recipe(*args)


def load_run(*args):
    return load.load_run(*args)


def test_loads_a_cluster(folder):
    cluster = load_cluster("cluster.yaml")
    assert (cluster.name, cluster.strategy, cluster.launcher) == ("cluster", "parameter_server", "local")
    assert [str(task) for task in cluster.tasks] == ["chief:0", "worker:0", "worker:1", "worker:2", "ps:0", "ps:1"]
    assert cluster.recipe is None
    assert cluster.run_dir is None


def test_loads_a_recipe(folder):
    recipe = load_recipe("recipes/recipe.yaml")
    assert recipe.params == {"hidden": [500, 500], "learning_rate": 0.001}
    assert recipe.train.epochs == 2
    assert recipe.module_dir == folder / "recipes"
    assert recipe.checkpoint is None


def test_a_whole_number_of_seconds_is_a_number_of_seconds(folder):
    (folder / "r.yaml").write_text("module: m\ncheckpoint: {every_seconds: 60}\n")
    assert load_recipe("r.yaml").checkpoint.every_seconds == 60.0


def test_relative_paths_start_at_their_file(folder, monkeypatch):
    sub = folder / "configs"
    sub.mkdir()
    (sub / "c.yaml").write_text("strategy: single\nroles: {chief: {}}\nrecipe: ../recipes/recipe.yaml\nrun_dir: runs\n")
    (folder / "recipes" / "recipe.yaml").write_text("module: digits\ncheckpoint: {every_steps: 5, dir: ck}\n")
    monkeypatch.chdir("/")
    cluster, recipe = load_run(sub / "c.yaml")
    assert cluster.recipe == folder / "recipes" / "recipe.yaml"
    assert cluster.run_dir == sub / "runs"
    assert recipe.checkpoint.dir == folder / "recipes" / "ck"
    monkeypatch.chdir(folder)
    assert load_run("configs/c.yaml") == (cluster, recipe)


def test_a_path_given_by_set_starts_here(folder, monkeypatch):
    monkeypatch.chdir(folder / "recipes")
    sets = ["run_dir=out", "recipe=recipe.yaml", "checkpoint={every_steps: 1, dir: ../ck}", "module_dir=."]
    cluster, recipe = load_run("../cluster.yaml", None, sets)
    assert cluster.run_dir == folder / "recipes" / "out"
    assert cluster.recipe == folder / "recipes" / "recipe.yaml"
    assert recipe.checkpoint.dir == folder / "ck"
    assert recipe.module_dir == folder / "recipes"


def test_home_and_absolute_paths(folder, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert load_cluster("cluster.yaml", ["run_dir=~/runs"]).run_dir == Path("/home/me/runs")
    assert load_cluster("cluster.yaml", ["run_dir=/tmp/../var/runs"]).run_dir == Path("/var/runs")


def test_parent_of_a_symbolic_link_is_kept(folder):
    (folder / "far" / "away").mkdir(parents=True)
    (folder / "link").symlink_to(folder / "far" / "away")
    assert load_cluster("cluster.yaml", ["run_dir=link/../runs"]).run_dir == folder / "link" / ".." / "runs"


def test_the_argument_wins_over_the_clusters_recipe(folder):
    (folder / "other.yaml").write_text("module: other\n")
    cluster, recipe = load_run("cluster.yaml", "other.yaml", ["recipe=recipes/recipe.yaml"])
    assert recipe.module == "other"
    assert cluster.recipe == folder / "other.yaml"


def test_overrides_go_where_their_key_is(folder):
    sets = [
        "train.epochs=7",
        "roles.worker.replicas=1",
        "roles.evaluator={}",
        "checkpoint.every_steps=5",
        "name=x",
        "params.hidden.1=3",
        "roles.ps.env={A: b}",
    ]
    cluster, recipe = load_run("cluster.yaml", "recipes/recipe.yaml", sets)
    assert cluster.roles.count("worker") == cluster.roles.count("evaluator") == 1
    assert cluster.name == "x"
    assert cluster.roles.ps.env == {"A": "b"}
    assert recipe.train.epochs == 7
    assert recipe.params["hidden"] == [500, 3]


@pytest.mark.parametrize(
    ("override", "value"), [("2", 2.0), ("-0", 0.0), ("true", True), ("0.5", 0.5), ("1e3", 1000.0), ("null", None)]
)
def test_a_whole_number_for_a_decimal_one_is_taken_for_such(override, value, folder):
    _, recipe = load_run("cluster.yaml", "recipes/recipe.yaml", [f"params.learning_rate={override}"])
    found = recipe.params["learning_rate"]
    assert (found, type(found)) == (value, type(value))


def test_parameters_may_be_set_as_a_whole_and_below_what_the_recipe_has(folder):
    (folder / "r.yaml").write_text("module: r\nparams: {files: null, sizes: {train: 3}}\n")
    recipe = load_recipe("r.yaml", ["params.files.train=a", "params.files.test=b", "params.sizes.test=2"])
    assert recipe.params == {"files": {"train": "a", "test": "b"}, "sizes": {"train": 3, "test": 2}}
    assert load_recipe("r.yaml", ["params={x: 1}", "train.epochs=2"]).params == {"x": 1}
    assert load_recipe("r.yaml", ["params={x: 1}", "params.x=2"]).params == {"x": 2}
    (folder / "none.yaml").write_text("module: r\n")
    assert codes_of(load_recipe, "none.yaml", ["params.x=1"]) == ["unknown-parameter"]


def test_the_last_override_wins_and_null_takes_a_key_away(folder):
    cluster = load_cluster(
        "cluster.yaml", ["name=a", "name=b", "roles.evaluator={}", "roles.evaluator=null", "run_dir=null"]
    )
    assert cluster.name == "b"
    assert cluster.roles.evaluator is None
    assert cluster.run_dir is None


def test_an_override_replaces_a_variable_that_is_not_set(folder):
    (folder / "c.yaml").write_text("strategy: single\nroles:\n  chief:\n    cpus: ${CPUS}\n")
    assert load_cluster("c.yaml", ["roles.chief.cpus=2"], {}).roles.chief.cpus == 2
    assert load_cluster("c.yaml", [], {"CPUS": "3"}).roles.chief.cpus == 3


def test_hosts_are_addresses(folder):
    cluster = load_cluster(
        "cluster.yaml",
        [
            "roles.ps={hosts: [10.0.0.1:2222, '[::1]', Gpu01]}",
            "roles.worker.hosts=[a]",
            "roles.worker.replicas=null",
            "roles.chief.hosts=[b:22]",
        ],
    )
    assert cluster.roles.ps.hosts == [Address("10.0.0.1"), Address("::1"), Address("gpu01")]


MISTAKES = Path(__file__).parent / "mistakes"
"""Files with their problems, a line for each: `#> LINE:COLUMN KEY [CODE] VALUE; VALUE`. The message has the values."""


@pytest.mark.parametrize("mistake", sorted(MISTAKES.glob("*.yaml")), ids=lambda path: path.stem)
def test_mistakes(folder, mistake):
    (folder / "f.yaml").write_text(text := mistake.read_text())
    expected = [line.removeprefix("#> ").split(" ", 3) for line in text.splitlines() if line.startswith("#> ")]
    files = ("f.yaml", None) if mistake.name.startswith("cluster_") else ("cluster.yaml", "f.yaml")
    problems = problems_of(load_run, *files, (), {})
    found = [(f"{each.place.line}:{each.place.column}", each.key or ".", f"[{each.code}]") for each in problems]
    assert found == [(place, key, code) for place, key, code, *_ in expected]
    for problem, (_, _, _, *values) in zip(problems, expected, strict=True):
        assert problem.place.file == "f.yaml"
        assert all(value in problem.message for value in "; ".join(values).split("; ")), problem


def test_a_cluster_with_other_numbers_is_checked_as_its_file_would_be(folder):
    path = folder / "cluster.yaml"
    cluster, recipe = load_run(path, folder / "recipes" / "recipe.yaml")
    more = resized(cluster, recipe, {"worker": 5, "ps": 1})
    settings = ["roles.worker.replicas=5", "roles.ps.replicas=1"]
    assert more == load_run(path, folder / "recipes" / "recipe.yaml", settings)[0]
    too_few = problems_of(resized, cluster, recipe, {"worker": 0, "chief": 2})
    assert {(problem.key, problem.code) for problem in too_few} == {
        ("roles.chief", "too-many-tasks"),
        ("roles.worker", "missing-role"),
    }
    [problem] = problems_of(resized, cluster, recipe, {"evaluator": 1})
    assert (problem.place.file, problem.code) == ("--set roles.evaluator.replicas=1", "nothing-to-evaluate")

    fixed = resized(cluster, None, {"ps": 2}).model_copy(
        update={"roles": cluster.roles.model_copy(update={"ps": RoleSpec(hosts=[Address("127.0.0.1", 2222)])})}
    )
    assert codes_of(resized, fixed, None, {"ps": 2}) == ["replicas-differ-from-hosts"]


def test_workers_that_are_no_multiple_of_the_stages(folder):
    (folder / "stages.yaml").write_text("strategy: model_parallel\nroles: {chief: {}, worker: {replicas: 3}}\n")
    [problem] = problems_of(load_run, "stages.yaml", "recipes/recipe.yaml", ["stages=2"])
    assert (problem.key, problem.code) == ("roles.worker", "stages-do-not-fit")


def test_updates_of_more_workers_than_there_are(folder):
    sets = ["updates.mode=sync", "updates.aggregate=4"]
    [problem] = problems_of(load_run, "cluster.yaml", "recipes/recipe.yaml", sets)
    assert (problem.key, problem.code) == ("roles.worker", "too-few-workers")
    assert "recipes/recipe.yaml" in problem.message


DATA = "  data_dispatcher: {}\n  data_worker: {replicas: 2}\n"


def test_data_workers_and_a_recipe_that_reads_from_them_need_each_other(folder):
    path = folder / "cluster.yaml"
    assert load_run(path, folder / "recipes" / "recipe.yaml")[1] is not None
    [problem] = problems_of(load_run, "cluster.yaml", "recipes/recipe.yaml", ["train.share=service"])
    assert (str(problem.place), problem.key, problem.code) == ("cluster.yaml:2:1", "roles.data_worker", "missing-role")
    path.write_text(path.read_text() + DATA)
    [problem] = problems_of(load_run, "cluster.yaml", "recipes/recipe.yaml")
    assert (str(problem.place), problem.key, problem.code) == ("cluster.yaml:8:3", "roles.data_worker", "role-not-used")
    cluster, recipe = load_run(path, folder / "recipes" / "recipe.yaml", ["train.share=service"])
    assert recipe.train.share == "service"
    assert cluster.roles.count("data_worker") == 2


OVERRIDES = {
    "roles.worker.replicas": ("malformed-override", "PATH=VALUE"),
    "=3": ("malformed-override", "PATH=VALUE"),
    "roles.worker.replicas=": ("malformed-override", "null"),
    "name= ": ("malformed-override", "null"),
    "roles..replicas=3": ("malformed-override", "PATH=VALUE"),
    "roles.worker.replicas=x": ("wrong-type", "'x'"),
    "roles.worker.replica=3": ("unknown-key", "'replicas'"),
    "worker.replicas=3": ("unknown-key", "'roles.worker.replicas'"),
    "trian.epochs=3": ("unknown-key", "'train.epochs'"),
    "xyz=3": ("unknown-key", "name, strategy, communication, "),
    "strategy.a=3": ("not-a-container", "cluster.yaml:1:11"),
    "params.learnin_rate=0.1": ("unknown-parameter", "'learning_rate'"),
    "params.xyz=1": ("unknown-parameter", "hidden, learning_rate"),
    "params.hidden.2=3": ("no-such-item", "0 to 1"),
    "params.hidden.x=3": ("no-such-item", "0 to 1"),
    "params.hidden.-1=3": ("no-such-item", "0 to 1"),
    "name=[": ("not-yaml", ""),
    f"params{'.a' * 50}=1": ("nested-too-deep", "50"),
    f"params.hidden={'[' * 50}": ("nested-too-deep", "50"),
    "name=!!python/name:os.system": ("yaml-tag", "os.system"),
    "name=${NO}": ("variable-not-set", "${NO:-default}"),
    "name=\udcff": ("invalid-character", "\\udcff"),
}


@pytest.mark.parametrize("override", OVERRIDES)
def test_mistakes_in_overrides(folder, override):
    code, value = OVERRIDES[override]
    [problem] = problems_of(load_run, "cluster.yaml", "recipes/recipe.yaml", [override], {})
    assert (problem.place.file, problem.code) == (f"--set {override}", code)
    assert value in problem.message


def test_all_overrides_are_reported_at_once(folder):
    assert codes_of(load_run, "cluster.yaml", None, ["a", "b=1", "name=["]) == [
        "malformed-override",
        "unknown-key",
        "not-yaml",
    ]


def test_a_recipes_override_needs_a_recipe(folder):
    [problem] = problems_of(load_run, "cluster.yaml", None, ["train.epochs=3"])
    assert (problem.place.file, problem.code) == ("--set train.epochs=3", "no-recipe")


def test_both_files_are_reported_at_once(folder):
    (folder / "c.yaml").write_text("strategy: x\nroles: {}\n")
    (folder / "r.yaml").write_text("modul: x\n")
    problems = problems_of(load_run, "c.yaml", "r.yaml")
    assert [(problem.place.file, problem.code) for problem in problems] == [
        ("c.yaml", "unknown-choice"),
        ("r.yaml", "missing-key"),
        ("r.yaml", "unknown-key"),
    ]


def test_a_recipe_for_a_cluster_is_recognised(folder):
    with pytest.raises(SpecError) as caught:
        load_cluster("recipes/recipe.yaml")
    assert "this is a recipe" in str(caught.value.hint)
    with pytest.raises(SpecError) as caught:
        load_recipe("cluster.yaml")
    assert "this is a cluster" in str(caught.value.hint)


def test_an_evaluator_needs_checkpoints_to_score(folder):
    [problem] = problems_of(load_run, "cluster.yaml", "recipes/recipe.yaml", ["roles.evaluator={}"])
    assert (problem.place.file, problem.code) == ("--set roles.evaluator={}", "nothing-to-evaluate")
    assert "'checkpoint'" in problem.message
    (folder / "c.yaml").write_text("strategy: single\nroles:\n  chief: {}\n  evaluator: {}\n")
    [problem] = problems_of(load_run, "c.yaml", "recipes/recipe.yaml", ["evaluate=null"])
    assert (str(problem.place), problem.code) == ("c.yaml:4:3", "nothing-to-evaluate")
    assert "'checkpoint' and 'evaluate'" in problem.message
    assert load_run("c.yaml", "recipes/recipe.yaml", ["checkpoint.every_steps=5"])[1].checkpoint.every_steps == 5


@pytest.mark.parametrize("override", ["evaluate.patience=3", "export={best: true}"])
def test_what_the_evaluator_does_needs_one(override, folder):
    given = ["checkpoint.every_steps=5", override]
    [problem] = problems_of(load_run, "cluster.yaml", "recipes/recipe.yaml", given)
    assert problem.code == "missing-role"
    assert load_run("cluster.yaml", "recipes/recipe.yaml", [*given, "roles.evaluator={}"])[0].roles.evaluator


def test_it_is_bad_usage(folder):
    with raises(SpecError, "unknown-key") as caught:
        load_cluster("cluster.yaml", ["roles.ps.replicas=x", "nam=y"])
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_file_names_its_cluster_whatever_it_is_called(folder):
    for name, expected in (("a\x1bb", "a_b"), ("é" * 120, "é" * 100), (".hidden", ".hidden")):
        path = folder / f"{name}.yaml"
        try:
            path.write_text("strategy: single\nroles: {chief: {}}\n")
        except OSError:
            continue  # longer than this file system's names
        assert load_cluster(path).name == expected


def test_the_current_folder_is_gone(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    (tmp_path / "c.yaml").write_text("strategy: single\nroles: {chief: {}}\n")
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert load_cluster(tmp_path / "c.yaml").name == "c"
    [problem] = problems_of(load_cluster, tmp_path / "c.yaml", ["run_dir=x"])
    assert (problem.place.file, problem.code) == ("x", "no-current-directory")
    assert problems_of(load_cluster, "c.yaml")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.text(), st.text("ab:-[]{}&*!|>'\"%@`#?,~ \n\t$0"), st.binary().map(lambda data: data.decode("latin-1"))
    )
)
def test_any_file_is_a_cluster_or_a_spec_error(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    for loader in (load_cluster, load_recipe):
        assert all(codes_of(loader, path))


KEYS = [
    "name",
    "strategy",
    "roles",
    "recipe",
    "run_dir",
    "params",
    "train",
    "export",
    "checkpoint",
    "evaluate",
    "module",
    "module_dir",
]
DEEP = ["roles.worker", "roles.worker.hosts", "export.format", "checkpoint.dir", "train.epochs", "params.hidden.0"]
PARTS = st.sampled_from(["replicas", "hosts", "cpus", "gpus", "env", "epochs", "format", "dir", "a"])
SOME_YAML = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text("ab/.~:$1", max_size=5), st.just("${A}")),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(PARTS, inner)),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(KEYS + DEEP), SOME_YAML)
def test_any_override_is_a_run_or_a_spec_error(folder, path, value):
    text = repr(value).replace("None", "null").replace("True", "true").replace("False", "false")
    try:
        load_run("cluster.yaml", "recipes/recipe.yaml", [f"{path}={text}"], {"A": "1"})
    except SpecError as error:
        assert all(problem.code for problem in error.problems)  # noqa: PT017
        assert "Input should" not in str(error)  # noqa: PT017
        assert "pydantic" not in str(error)  # noqa: PT017
