"""Updates in lockstep: all workers and ps take each update together, without a decision of the chief."""
