"""A plan as Kubernetes objects, validated against the schemas of Kubernetes and of the operators."""

import copy
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.documents import to_yaml
from tfdist_cli.launch.kubernetes.launcher import KubernetesLauncher
from tfdist_cli.launch.kubernetes.manifests import manifests
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import make_plan
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe

ROOT = Path(__file__).parents[3]
CRDS = ROOT.parent / "shared" / "crd"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
KINDS = ("jobset", "tfjob", "plain", "pods")
ROLES: dict[str, dict[str, Any]] = {
    "chief": {"secrets": {"KEY": {"env": "FROM"}}},
    "ps": {"cpus": 2, "memory": "4GiB", "env": {"A": '$(HOME) it\'s; "ü"\n'}},
    "worker": {"replicas": 3, "gpus": 2},
    "evaluator": {},
}
ALL = {
    "image": "registry.example/tfdist:1.0",
    "image_pull_policy": "IfNotPresent",
    "image_pull_secrets": ["registry"],
    "namespace": "training",
    "service_account": "trainer",
    "claim": "runs",
    "volumes": ["data:/data:ro", "scratch:/scratch"],
    "secret": "keys",
    "node_selector": {"example.com/pool": "gpu"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "ttl_seconds": 600,
}
NAMES = ["digits", "a'; echo foo", "Ümläut", "x" * 100, "7", "-", "with space", "x" * 99 + "y"]


def planned(kind, *, name="digits", strategy="parameter_server", roles=ROLES, command=(), recipe=None, **settings):
    cluster = Cluster.model_validate(
        {
            "name": name,
            "strategy": strategy,
            "launcher": "kubernetes",
            "roles": roles,
            "kubernetes": {**ALL, "kind": kind, **settings},
        }
    )
    addresses = KubernetesLauncher().preview_addresses(cluster)
    machine = Machine(4, ("0",) * 8)
    return make_plan(cluster, recipe, addresses=addresses, run_dir=Path("/x"), machine=machine, command=command)


def digits(**more):
    module = {"module": "mlp", "module_dir": ROOT / "recipes", "checkpoint": {"every_steps": 10}}
    return Recipe.model_validate({**module, **more})


def objects(kind, **more):
    if "command" not in more:
        more.setdefault("recipe", digits())
    return list(yaml.load_all(to_yaml(manifests(planned(kind, **more))), LOADER))


def of_kind(found, kind):
    return [each for each in found if each["kind"] == kind]


def pods(found):
    """Each pod template's spec, by the name of its object."""
    made = {}
    for each in found:
        spec = each.get("spec", {})
        for job in spec.get("replicatedJobs", ()):
            made[job["name"]] = job["template"]["spec"]["template"]
        for role, replica in spec.get("tfReplicaSpecs", {}).items():
            made[role.lower()] = replica["template"]
        if each["kind"] == "Job":
            made[each["metadata"]["name"]] = spec["template"]
        if each["kind"] == "Pod":
            made[each["metadata"]["name"]] = each
    return made


@cache
def schema_of(kind):
    """A custom resource's schema that refuses unknown keys."""
    name = {"JobSet": "jobsets", "TFJob": "tfjobs"}[kind]
    if not CRDS.is_dir():
        pytest.skip(f"there are no custom resource definitions in {CRDS}")
    crd = yaml.load((CRDS / f"{name}.yaml").read_text(), LOADER)
    schema = copy.deepcopy(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    close(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def close(schema):
    """Refuses unknown keys, and accepts a number or text where Kubernetes accepts either."""
    if isinstance(schema, list):
        for each in schema:
            close(each)
    if not isinstance(schema, dict):
        return
    if schema.pop("x-kubernetes-int-or-string", False):
        schema.pop("type", None)
        schema.setdefault("anyOf", [{"type": "integer"}, {"type": "string"}])
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or schema.get("x-kubernetes-embedded-resource")
    if schema.get("type") == "object" and "properties" in schema and not is_open:
        schema.setdefault("additionalProperties", False)
    for value in list(schema.values()):
        close(value)


def validate(found):
    for each in found:
        if each["kind"] in ("JobSet", "TFJob"):
            jsonschema.Draft7Validator(schema_of(each["kind"])).validate(each)
        else:
            kubernetes_validate.validate(each, "1.31", strict=True)
    for template in pods(found).values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"]}
        kubernetes_validate.validate(pod, "1.31", strict=True)


@pytest.fixture(scope="module", autouse=True)
def _each_schema_is_read_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kubernetes_validate.utils, "schema_contents", cache(kubernetes_validate.utils.schema_contents))
        yield


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["parameter_server", "multi_worker_mirrored"])
def test_all_settings_give_valid_objects(kind, strategy):
    roles = ROLES if strategy == "parameter_server" else {"worker": {"replicas": 2, "gpus": 1, "cpus": 4}}
    validate(objects(kind, strategy=strategy, roles=roles))
    validate(objects(kind, strategy=strategy, roles=roles, command=("python", "it's $(HOME)")))


@pytest.mark.parametrize("kind", KINDS)
def test_the_defaults_give_valid_objects(kind):
    cluster = Cluster.model_validate({"strategy": "single", "roles": {"chief": {}}, "kubernetes": {"kind": kind}})
    addresses = KubernetesLauncher().preview_addresses(cluster)
    plan = make_plan(cluster, digits(), addresses=addresses, run_dir=Path("/x"), machine=Machine(1))
    validate(manifests(plan))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_in_a_bucket_needs_no_claim(kind):
    plan = planned(kind, recipe=digits(), claim=None, volumes=[], roles={**ROLES, "worker": {"replicas": 2}})
    url = {"TFDIST_RUN_URL": "s3://bucket/runs/digits"}
    plan = replace(plan, tasks=tuple(replace(each, env={**each.env, **url}) for each in plan.tasks))
    found = list(yaml.load_all(to_yaml(manifests(plan)), LOADER))
    validate(found)
    assert "persistentVolumeClaim" not in to_yaml(found)
    for name, template in pods(found).items():
        variables = {each["name"]: each.get("value") for each in template["spec"]["containers"][0]["env"]}
        assert variables["TFDIST_RUN_URL"] == "s3://bucket/runs/digits", name
        assert variables["TFDIST_RUN_DIR"] == "/tfdist/runs/digits"


def test_the_validation_refuses_invalid_objects():
    [*_, jobset] = objects("jobset")
    jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(schema_of("JobSet")).validate(jobset)
    service = of_kind(objects("plain"), "Service")[0]
    service["spec"]["prots"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        validate([service])


@pytest.mark.rotates(5)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_names_become_labels(kind, name):
    roles = {"chief": {}, "ps": {}, "worker": {"replicas": 101}}
    found = manifests(planned(kind, name=name, roles=roles, command=("true",)))
    longest = {"jobset": "-worker-0-100-abcde", "tfjob": "-worker-100", "plain": "-worker-100-abcde", "pods": ""}[kind]
    for each in found:
        assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", each["metadata"]["name"])
        assert len(each["metadata"]["name"]) <= 63 - (len("-abcde") if each["kind"] in ("Job", "Pod") else len(longest))


def test_hostile_names_do_not_collide():
    assert len({objects("plain", name=name)[0]["metadata"]["name"] for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize(
    ("kind", "host"),
    [("jobset", "digits-worker-0-1.digits:2222"), ("plain", "worker-1.digits:2222"), ("pods", "worker-1.digits:2222")],
)
def test_addresses_are_the_pods_dns_names(kind, host):
    container = next(iter(pods(objects(kind)).values()))["spec"]["containers"][0]
    [config] = [each["value"] for each in container["env"] if each["name"] == "TF_CONFIG"]
    assert host in config
    assert container["command"][:2] == ["tfdist", "role"]
    assert container["command"][-2:] == ["/tfdist/job/recipe.yaml", "--planned"]


def test_the_pods_have_the_recipe_and_its_module(tmp_path):
    [config] = of_kind(objects("jobset"), "ConfigMap")
    assert config["data"]["mlp.py"] == (ROOT / "recipes" / "mlp.py").read_text()
    (tmp_path / "recipe.yaml").write_text(config["data"]["recipe.yaml"])
    assert yaml.safe_load(config["data"]["recipe.yaml"])["module_dir"] == "/tfdist/job"


@pytest.mark.parametrize(
    ("here", "there"), [("/x/checkpoints", "/tfdist/runs/digits/checkpoints"), ("/saved", "/saved")]
)
def test_checkpoint_folders_in_the_run_directory_move_with_it(here, there):
    recipe = digits(checkpoint={"every_steps": 10, "dir": Path(here)})
    [config] = of_kind(objects("pods", recipe=recipe), "ConfigMap")
    assert yaml.safe_load(config["data"]["recipe.yaml"])["checkpoint"]["dir"] == there


def test_packages_and_large_modules_are_refused(tmp_path):
    (tmp_path / "package").mkdir()
    with raises(UsageError, "module-is-a-package"):
        objects("jobset", recipe=digits(module="package.model", module_dir=tmp_path))
    (tmp_path / "large.py").write_text("#" * 2**20)
    with raises(UsageError, "recipe-too-large"):
        objects("jobset", recipe=digits(module="large", module_dir=tmp_path))


def test_an_installed_module_is_not_sent(tmp_path):
    [config] = of_kind(objects("jobset", recipe=digits(module="os.path", module_dir=tmp_path)), "ConfigMap")
    assert set(config["data"]) == {"recipe.yaml"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_has_no_more_rights_than_it_needs(kind):
    for template in pods(objects(kind)).values():
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        [container] = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert writable == {"/tmp", "/tfdist/runs", "/scratch"}


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_jobs_pods_may_connect_to_its_tasks(kind):
    found = objects(kind)
    [policy] = of_kind(found, "NetworkPolicy")
    own = policy["spec"]["podSelector"]["matchLabels"]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    [rule] = policy["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": own}}]
    assert rule["ports"] == [
        {"protocol": "TCP", "port": port} for port in (2222, 2223)
    ]  # tasks, and joins at the chief
    for template in pods(found).values():
        assert own.items() <= template["metadata"]["labels"].items()


def test_resources_and_gpus():
    found = pods(objects("jobset"))
    [ps], [worker] = found["ps"]["spec"]["containers"], found["worker"]["spec"]["containers"]
    assert ps["resources"]["limits"] == ps["resources"]["requests"] == {"cpu": "2", "memory": "4Gi"}
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    values = {each["name"]: each.get("value") for each in worker["env"]}
    assert values["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_gpus_cannot_be_named():
    with raises(UsageError, "gpus-chosen-by-scheduler"):
        objects("plain", roles={**ROLES, "worker": {"gpus": [0]}})


def test_kubernetes_expands_no_variables():
    found = pods(objects("jobset", command=("echo", "$(HOME)")))
    assert found["ps"]["spec"]["containers"][0]["command"][-3:] == ["--", "echo", "$$(HOME)"]
    values = {each["name"]: each.get("value") for each in found["ps"]["spec"]["containers"][0]["env"]}
    assert values["A"] == ROLES["ps"]["env"]["A"].replace("$", "$$")
    assert found["ps"]["spec"]["containers"][0]["command"][3] == "ps:$(TFDIST_INDEX)"


def test_secrets_come_from_a_secret():
    [chief] = pods(objects("plain"))["digits-chief-0"]["spec"]["containers"]
    assert chief["env"][-1] == {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "KEY"}}}
    with raises(UsageError, "kubernetes-secret-not-set") as caught:
        objects("plain", secret=None)
    assert "--from-literal=KEY" in str(caught.value.hint)


def test_a_jobset_cannot_go_on_without_an_evaluator():
    never = {**ROLES, "evaluator": {"restart": {"policy": "never"}}}
    with raises(UsageError, "role-not-supported"):
        objects("jobset", roles=never)
    assert objects("plain", roles=never)


def test_nccl_uses_ports_of_its_own():
    roles = {"worker": {"replicas": 2, "gpus": 1}}
    [policy] = of_kind(objects("jobset", strategy="multi_worker_mirrored", roles=roles), "NetworkPolicy")
    [rule] = policy["spec"]["ingress"]
    assert "ports" not in rule
    assert rule["from"] == [{"podSelector": policy["spec"]["podSelector"]}]


def test_restarts_in_a_jobset():
    [*_, jobset] = objects("jobset", roles={**ROLES, "evaluator": {"restart": {"policy": "replace", "max": 0}}})
    jobs = {each["name"]: each["template"]["spec"] for each in jobset["spec"]["replicatedJobs"]}
    assert {name: job["backoffLimit"] for name, job in jobs.items()} == {
        "chief": 0, "worker": 9, "ps": 0, "evaluator": 0
    }  # fmt: skip
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 3
    assert [rule["action"] for rule in jobset["spec"]["failurePolicy"]["rules"]] == ["FailJobSet"]
    assert jobset["spec"]["successPolicy"]["targetReplicatedJobs"] == ["chief", "evaluator"]
    policies = {name: job["podFailurePolicy"]["rules"] for name, job in jobs.items()}
    assert {name: [rule["action"] for rule in rules] for name, rules in policies.items()} == {
        "chief": ["Count", "FailJob"],
        "worker": ["Ignore", "FailJob"],
        "ps": ["Count", "FailJob"],
        "evaluator": ["Ignore", "FailJob"],
    }
    assert policies["ps"][1]["onExitCodes"]["values"] == [2, 137]
    [*_, bare] = objects("jobset", command=("true",))
    assert bare["spec"]["failurePolicy"]["maxRestarts"] == 0


@pytest.mark.parametrize(("kind", "code"), [("jobset", "143"), ("plain", "143"), ("tfjob", "143"), ("pods", None)])
def test_a_worker_that_leaves_does_not_count_as_complete_where_its_pod_is_replaced(kind, code):
    template = next(each for name, each in pods(objects(kind)).items() if "worker" in name)
    [container] = template["spec"]["containers"]
    assert {each["name"]: each.get("value") for each in container["env"]}.get("TFDIST_LEAVE_CODE") == code


def test_restarts_in_a_tfjob():
    [*_, tfjob] = objects("tfjob")
    assert {each["restartPolicy"] for each in tfjob["spec"]["tfReplicaSpecs"].values()} == {"ExitCode"}
    assert pods([tfjob])["chief"]["spec"]["containers"][0]["command"] == [
        "tfdist", "role", "--recipe", "/tfdist/job/recipe.yaml", "--planned"
    ]  # fmt: skip
    with raises(UsageError, "role-not-supported"):
        objects("tfjob", roles={**ROLES, "data_dispatcher": {}, "data_worker": {}})


def test_each_plain_job_is_one_task():
    found = objects("plain")
    names = [each["metadata"]["name"] for each in of_kind(found, "Job")]
    assert names[:3] == ["digits-chief-0", "digits-worker-0", "digits-worker-1"]
    [service] = of_kind(found, "Service")
    pod = pods(found)["digits-worker-1"]["spec"]
    assert f"{pod['hostname']}.{pod['subdomain']}" == "worker-1.digits"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert pod["containers"][0]["command"][3] == "worker:1"


@pytest.mark.parametrize("kind", ["plain", "pods"])
def test_objects_of_further_workers_fit_the_chief_that_runs(kind):
    def made(workers):
        roles = {"chief": {}, "ps": {}, "worker": {"replicas": workers, "max": 4}}
        return pods(objects(kind, roles=roles))

    before, after = made(2), made(3)
    assert before.keys() < after.keys()
    [name] = after.keys() - before.keys()
    assert "worker-2" in name

    def env(template):
        return {each["name"]: each.get("value") for each in template["spec"]["containers"][0]["env"]}

    chief = next(env(template) for name, template in before.items() if "chief" in name)
    joining = env(after[name])
    for variable in ("TFDIST_JOIN_ADDRESS", "TFDIST_MAX_WORKERS"):
        assert joining[variable] == chief[variable]
    config = json.loads(joining["TF_CONFIG"])
    assert config["cluster"]["worker"][config["task"]["index"]].startswith("worker-2.")
