"""Runs as commands and programs use them: in a directory of this machine, or in a storage service."""
