"""Running one of the programs in `programs/` in a process of its own, which is in no cluster."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def output_of(program, *arguments):
    """What `programs/PROGRAM.py` prints; it has to end well.

    Args:
        program: its name without `.py`.
        arguments: its arguments.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TF_CONFIG", "TFDIST_"))}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "programs" / f"{program}.py"), *arguments],
        env=environment | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()
