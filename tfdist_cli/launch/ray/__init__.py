"""The Ray launcher: each task runs in an actor of a placement group."""
