"""The `tfdist` command: each module parses the options of one command, calls the library and prints."""
