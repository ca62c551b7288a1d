"""Runs the tasks of a plan as pods of a Kubernetes cluster."""
