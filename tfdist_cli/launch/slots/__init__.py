"""Slots of an engine such as Spark: each runs an agent that connects to the launcher, and one task of the cluster."""
