"""Many nodes, one job: real daemons and real DeepSpeed, each node with a disk of its own."""
