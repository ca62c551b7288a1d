"""Variables on a cluster: placement on ps, sharding, initial values, copies on mirrored workers."""
