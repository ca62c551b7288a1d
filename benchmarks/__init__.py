"""Throughput of tfdist compared with other libraries, and wall times of its commands."""
