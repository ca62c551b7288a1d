"""`python -m tfdist_cli.tracking RUN_DIR TRACKER`: the process of one tracker, which a launcher starts."""

import sys
from pathlib import Path

from tfdist_cli.tracking.process import track

if __name__ == "__main__":
    sys.exit(track(Path(sys.argv[1]), sys.argv[2]))
