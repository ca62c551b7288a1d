"""Throughput of tfdist beside its peers, and how long its commands take."""
