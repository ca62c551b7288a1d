"""One run: its directory, event log, report, history and session."""
