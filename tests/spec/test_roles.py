"""A new role is one row of the table, and one module with what it does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from tfdist_cli.spec.roles import ROLES, Role
from tfdist_cli.spec.strategies import STRATEGIES, Strategy

ROOT = Path(__file__).parents[2]

ROW = """
from tfdist_cli.spec import roles

roles.ROLES["greeter"] = roles.RoleTraits(
    "Greets the tasks that train.", colour="red", tf_config_key="greeters", server="greeter:start"
)
"""
"""Python imports it before any program: every process has the table as it is with the row."""
MODULE = """
import socket
import threading


def start(environment):
    server = socket.create_server(("", environment.addresses[environment.task].port))

    def serve():
        while True:
            with server.accept()[0] as connection:
                connection.sendall(f"hello from {environment.task}".encode())

    threading.Thread(target=serve, daemon=True).start()
    return server
"""
PROGRAM = """
import socket

import tfdist_cli as tfdist
from tfdist_cli.protocol.environment import Environment
from tfdist_cli.spec.task_id import TaskId

with tfdist.scope():  # a greeter serves here until the chief exits
    address = Environment.read().addresses[TaskId("greeter", 1)]
    with socket.create_connection((address.host, address.port)) as connection:
        print(connection.recv(100).decode())
"""
CLUSTER = "strategy: single\nroles: {chief: {}, greeter: {replicas: 2}}\n"


def with_greeter(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `tfdist` where the table has one more row."""
    files = {"sitecustomize.py": ROW, "greeter.py": MODULE, "program.py": PROGRAM, "c.yaml": CLUSTER}
    for name, text in files.items():
        (folder / name).write_text(text)
    env = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    command = [sys.executable, "-m", "tfdist_cli", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.slow
def test_a_row_makes_a_role_that_files_and_plans_know(tmp_path):
    done = with_greeter(tmp_path, "plan", "c.yaml", "--json", "--", "true")
    assert done.returncode == 0, done.stderr
    tasks = {task["task"]: task for task in json.loads(done.stdout)["tasks"]}
    assert list(tasks) == ["chief:0", "greeter:0", "greeter:1"]
    config = json.loads(tasks["greeter:1"]["env"]["TF_CONFIG"])
    assert list(config["cluster"]) == ["chief"]
    assert config["greeters"] == {"greeter": [tasks["greeter:0"]["address"], tasks["greeter:1"]["address"]]}
    schema = json.loads(with_greeter(tmp_path, "schema", "cluster").stdout)
    assert schema["$defs"]["Roles"]["properties"]["greeter"]["description"] == "Greets the tasks that train."


@pytest.mark.slow
@pytest.mark.tensorflow
def test_its_module_serves_until_the_chief_exits(tmp_path):
    done = with_greeter(tmp_path, "launch", "c.yaml", "--", sys.executable, "program.py")
    assert done.returncode == 0, done.stderr
    assert "hello from greeter:1" in done.stdout + done.stderr


def test_the_types_name_the_rows():
    assert list(get_args(Role)) == list(ROLES)
    assert list(get_args(Strategy)) == list(STRATEGIES)
