"""Store bytes and records: the node's disk, the journal, object stores, remotes."""
