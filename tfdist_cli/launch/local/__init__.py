"""Runs the tasks of a plan as processes on this machine."""
