"""What a machine, or each host of a cluster, lacks: a probe that looks, and findings that follow from what it saw."""
