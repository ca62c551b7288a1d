"""The protocol between a task and its launcher: environment variables, records, heartbeats and files of a run."""
