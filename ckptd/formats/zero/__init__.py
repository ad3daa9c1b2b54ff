"""Map each parameter to bytes of the ranks' shards."""
