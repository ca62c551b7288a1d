"""Runs the tasks of a plan in containers of this machine."""
