"""From files, `--set` and environment variables to checked sections, with the position of each problem."""
