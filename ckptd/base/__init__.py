"""Work with files, extents, retries and child processes: nothing here knows what a checkpoint is."""
