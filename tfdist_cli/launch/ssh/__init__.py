"""Runs the tasks of a plan on other machines, by `ssh` and a small agent on each."""
