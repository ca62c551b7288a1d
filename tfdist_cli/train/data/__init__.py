"""Input pipelines: what a user passes, one shard per worker, a reproducible order."""
