"""Asynchronous updates: a worker runs executions of several steps by itself, which the chief schedules."""
