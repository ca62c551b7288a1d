"""A stand-in for kubectl, and for its cluster, which is a folder of files.

KUBECTL_SCRIPT has the steps of each task's pod.
"""

import json
import os
import sys
import time
from pathlib import Path

import yaml

LOADER, DUMPER = (getattr(yaml, f"C{name}", getattr(yaml, name)) for name in ("SafeLoader", "SafeDumper"))
folder = Path(os.environ["KUBECTL_FOLDER"])
script = json.loads(os.environ["KUBECTL_SCRIPT"])
arguments = [word for word in sys.argv[1:] if word not in ("--namespace", "training")]
with (folder / "calls").open("a") as calls:
    calls.write(" ".join(arguments) + "\n")


def steps(name):
    """The steps of a pod, by its name or by its task."""
    return script.get(name) or next(steps for task, steps in script.items() if f"-{task}-" in name)


def event(kind="MODIFIED", *, state=None, **status):
    if state:
        status["containerStatuses"] = [{"name": "tensorflow", "state": state}]
    print(json.dumps({"type": kind, "object": {"kind": "Pod", "status": status}}, indent=4), flush=True)


def unschedulable(_, message):
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    event(phase="Pending", conditions=[condition])


def waiting(_, reason):
    event(phase="Pending", state={"waiting": {"reason": reason, "message": "as it is"}})


def running(*_):
    event(phase="Running", state={"running": {}})


def exits(name, code):
    (folder / f"{name}.exited").touch()
    event(phase="Succeeded", state={"terminated": {"exitCode": code}})  # the watching launcher kills this program then
    sys.exit()


def follows(name, value):
    other, code = value
    await_file(f"{other}.exited")
    exits(name, code)


def watch_ends(name, _):
    if not (folder / f"{name}.again").exists():
        (folder / f"{name}.again").touch()
        sys.exit()


def gone(*_):
    event("DELETED", phase="Running")
    sys.exit()


def await_file(name):
    while not (folder / name).exists():
        time.sleep(0.02)


def gone_when_deleted(name, _):
    await_file(f"{name}.deleted")
    gone()


def read_again(name, _):
    """Waits until the output is read a second time."""
    while sum(line.startswith("logs") and name in line for line in (folder / "calls").read_text().splitlines()) < 2:
        time.sleep(0.02)


def until_deleted(name, code):
    await_file(f"{name}.deleted")
    event(phase="Failed", state={"terminated": {"exitCode": code}})
    sys.exit()


STEPS = {
    step.__name__: step
    for step in (
        *(unschedulable, waiting, running, exits, follows, watch_ends, gone, gone_when_deleted, until_deleted),
        read_again,
    )
}


if arguments[0] == "version" and os.environ.get("KUBECTL_DOWN"):
    print("first", "The connection was refused", sep="\n", file=sys.stderr)
    sys.exit(1)
elif arguments[0] == "create":
    for document in yaml.load_all(sys.stdin.read(), LOADER):
        path = folder / f"{document['kind']}.{document['metadata']['name']}.yaml"
        if path.exists():
            print(
                f'Error from server (AlreadyExists): "{document["metadata"]["name"]}" already exists', file=sys.stderr
            )
            sys.exit(1)
        path.write_text(yaml.dump(document, Dumper=DUMPER))
elif arguments[0] == "get":
    for step, value in steps(arguments[2]):
        if step in STEPS:
            STEPS[step](arguments[2], value)
elif arguments[0] == "logs":
    for step, value in steps(arguments[-1]):
        if step == "says":
            print(value, flush=True)
elif arguments[:2] == ["delete", "pod"]:
    name = next(word for word in arguments[2:] if not word.startswith("--"))
    (folder / f"{name}.deleted").touch()
