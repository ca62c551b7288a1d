"""`python -m tfdist_cli` is `tfdist`."""

from tfdist_cli.cli.app import main

main()
