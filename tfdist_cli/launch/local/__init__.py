"""Runs the tasks of a plan as processes of this machine."""
