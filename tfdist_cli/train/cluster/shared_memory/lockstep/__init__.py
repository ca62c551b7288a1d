"""Synchronous steps of workers of one host: the ps make the updates in rounds, or the workers make them together."""
