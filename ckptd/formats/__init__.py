"""Read the files that DeepSpeed and torch write, without torch."""
