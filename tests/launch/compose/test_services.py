"""A plan as containers: in a compose file and as arguments of the engine."""

from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.compose.launcher import ComposeLauncher
from tfdist_cli.launch.compose.services import compose_file, project_name, run_argv, service_of
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import make_plan
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.task_id import TaskId

HOSTILE = "a'; echo $HOME ${B} \"ü\n"
ROLES = {"chief": {}, "ps": {"cpus": 1, "memory": "2GiB"}, "worker": {"replicas": 2, "gpus": 1, "env": {"W": HOSTILE}}}


@pytest.fixture(autouse=True)
def user(monkeypatch):
    monkeypatch.setattr("os.getuid", lambda: 1234)
    monkeypatch.setattr("os.getgid", lambda: 99)


def planned(run_dir=Path("/runs/it"), recipe=None, command=(), **more):
    cluster = Cluster.model_validate(
        {"name": "it", "strategy": "parameter_server", "launcher": "compose", "roles": ROLES, **more}
    )
    addresses = ComposeLauncher().preview_addresses(cluster)
    return make_plan(
        cluster, recipe, addresses=addresses, run_dir=run_dir, machine=Machine(4, ("0", "1")), command=command
    )


def trained(**more):
    recipe = Recipe.model_validate(
        {
            "module": "digits_mlp",
            "module_dir": Path("/home/me/recipes"),
            "params": {"text": "costs $5"},
            "checkpoint": {"every_steps": 10, "dir": Path("/saved")},
        }
    )
    return planned(recipe=recipe, **more)


def service_in(plan, name):
    return yaml.safe_load(compose_file(plan, "docker"))["services"][name]


def test_a_recipes_compose_file():
    plan = trained(compose={"image": "me/tfdist:1", "volumes": ["/data:/data:ro", "/cache:/cache"]})
    made = yaml.safe_load(compose_file(plan, "docker"))
    assert made["name"] == project_name(Path("/runs/it"))
    assert list(made["services"]) == ["chief-0", "worker-0", "worker-1", "ps-0"]
    assert made["networks"] == {"default": {"internal": True}}
    assert yaml.safe_load(made["configs"]["recipe"]["content"])["params"] == {"text": "costs $$$$5"}
    ps = made["services"]["ps-0"]
    assert "ports" not in ps
    role = ["tfdist", "role", "--task", "ps:0", "--recipe", "/run/tfdist/recipe.yaml", "--planned"]
    assert ps["entrypoint"] + ps["command"] == role
    assert (ps["cpus"], ps["mem_limit"], ps["init"], ps["restart"]) == (1, "2147483648b", True, "no")
    assert (ps["user"], ps["cap_drop"]) == ("1234:99", ["ALL"])
    assert [(each["source"], each["target"], each["read_only"]) for each in ps["volumes"]] == [
        ("/runs/it", "/runs/it", False),
        ("/home/me/recipes", "/home/me/recipes", True),
        ("/saved", "/saved", False),
        ("/data", "/data", True),
        ("/cache", "/cache", False),
    ]


def test_addresses_are_the_services_names():
    env = service_in(trained(), "worker-1")["environment"]
    assert '"worker":["worker-0:2222","worker-1:2222"]' in env["TF_CONFIG"]
    assert env["TF_CONFIG"].endswith('"task":{"type":"worker","index":1}}')
    assert "worker-0" in env["no_proxy"]


def test_containers_share_the_cores_of_this_machine():
    env = service_in(trained(), "worker-1")["environment"]
    assert env["TF_NUM_INTRAOP_THREADS"] == "2"


def test_gpus_are_renumbered_from_0_in_a_container():
    worker = service_in(trained(), "worker-1")
    assert worker["devices"] == ["nvidia.com/gpu=1"]
    assert worker["environment"]["CUDA_VISIBLE_DEVICES"] == "0"
    ps = service_in(trained(), "ps-0")
    assert "devices" not in ps
    assert ps["environment"]["CUDA_VISIBLE_DEVICES"] == "-1"


def test_hostile_text_stays_literal():
    plan = planned(command=("echo", HOSTILE), run_dir=Path("/runs/a'; echo $foo ü"))
    worker = service_in(plan, "worker-0")
    assert worker["entrypoint"] == ["echo"]
    assert worker["command"] == [HOSTILE.replace("$", "$$")]
    assert worker["environment"]["W"] == HOSTILE.replace("$", "$$")
    assert worker["volumes"][0]["source"] == "/runs/a'; echo $$foo ü"
    assert "configs" not in worker


def test_secrets_are_referenced_without_their_values(tmp_path, monkeypatch):
    monkeypatch.setenv("FROM", "s3cr3t-value")
    (tmp_path / "key").write_text("s3cr3t-value")
    secrets = {"KEY": {"env": "FROM"}, "TOKEN": {"file": tmp_path / "key"}}
    plan = planned(command=("true",), roles={**ROLES, "chief": {"secrets": secrets}})
    env = service_in(plan, "chief-0")["environment"]
    assert [env[name].partition(":?")[0] for name in ("KEY", "TOKEN")] == ["${FROM", "${TOKEN"]
    assert env["TFDIST_SECRETS"] == "KEY,TOKEN"
    assert "KEY" not in service_in(plan, "ps-0")["environment"]
    assert "s3cr3t" not in compose_file(plan, "docker")


@pytest.mark.parametrize("path", ["/runs/a:b", "/runs/a\nb"])
def test_a_folder_that_cannot_be_mounted(path):
    with raises(UsageError, "path-not-mountable"):
        compose_file(planned(run_dir=Path(path), command=("true",)), "docker")


def test_arguments_of_the_engine_match_the_file():
    plan = trained()
    for engine in ("docker", "podman"):
        service = service_of(plan, plan[TaskId("ps")], engine)
        argv = run_argv(service, plan.run_dir, "project", "project-ps-0-1", ["OWN"])
        options = list(pairwise(argv))
        expected = [
            ("--name", "project-ps-0-1"),
            ("--network", "project"),
            ("--network-alias", "ps-0"),
            ("--user", "1234:99"),
            ("--cap-drop", "ALL"),
            ("--volume", "/runs/it:/runs/it"),
            ("--volume", "/home/me/recipes:/home/me/recipes:ro"),
            ("--volume", "/runs/it/recipe.yaml:/run/tfdist/recipe.yaml:ro"),
            ("--env", "OWN"),
            ("--env", f"TF_CONFIG={service.env['TF_CONFIG']}"),
            ("--cpus", "1"),
            ("--memory", "2147483648b"),
            ("--entrypoint", "tfdist"),
        ]
        assert not [option for option in expected if option not in options]
        assert argv[-3:] == ["--recipe", "/run/tfdist/recipe.yaml", "--planned"]
        assert (("--userns", "keep-id") in options) == (engine == "podman")
        assert not {"--publish", "-p", "--privileged"} & set(argv)


def test_folders_of_the_same_name_are_different_projects():
    names = {project_name(Path(path)) for path in ("/a/digits", "/b/digits", "/a/Digits", "/a/" + "x" * 250)}
    assert len(names) == 4
    assert max(map(len, names)) <= 40
