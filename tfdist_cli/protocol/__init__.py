"""What a task and its launcher exchange: environment variables, records, heartbeats and files of a run."""
