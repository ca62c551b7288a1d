"""The Spark launcher: the tasks run in the slots of a barrier stage."""
