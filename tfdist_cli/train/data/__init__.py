"""Input pipelines: the data that a user passes, one shard per worker, a reproducible order."""
