"""Examines this machine or the hosts of a cluster: a probe collects facts, and findings are derived from them."""
