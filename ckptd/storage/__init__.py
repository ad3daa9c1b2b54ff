"""Where bytes and records lie: the node's disk, the journal, stores, remotes."""
