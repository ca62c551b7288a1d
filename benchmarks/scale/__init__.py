"""How far a cluster can grow: a model of its costs, and a simulation of the launcher's decisions."""
