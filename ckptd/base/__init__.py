"""Files, extents, retries, child processes: nothing here knows what a checkpoint is."""
