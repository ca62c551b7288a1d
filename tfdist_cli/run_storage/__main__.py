"""`python -m tfdist_cli.run_storage TASK`: the process that uploads a run directory, which a launcher starts."""

import sys

from tfdist_cli.run_storage.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
