"""A shell script in place of a task that can be profiled, for the tests of each launcher."""

from tfdist_cli.launch.supervisor.events import Output, ProfileAccepted
from tfdist_cli.protocol.profile_order import ProfileOrder

ORDER = ProfileOrder("a", 2.0, "profile/plugins/profile/now/worker-0.xplane.pb")
BYTES = 2_500_000
SCRIPT = f"""
echo ready
until [ -e "$TFDIST_TASK_DIR/profile.json" ]; do sleep 0.01; done
mkdir -p "$(dirname "$TFDIST_RUN_DIR/{ORDER.path}")"
seq {BYTES} | head -c {BYTES} > "$TFDIST_RUN_DIR/{ORDER.path}"
printf '\\036{{"kind":"profiled","request":"a"}}\\n' >&2
"""


def order_when_ready(task):
    """Reacts to the script's first line, of this task."""

    def react(event, _state):
        if isinstance(event, Output) and event.task == task and "ready" in event.lines:
            yield ProfileAccepted(task, ORDER)

    return react


def expected():
    """The content of the profile."""
    return "".join(f"{number}\n" for number in range(1, 400_000)).encode()[:BYTES]
