"""What DeepSpeed and torch put on disk, read without torch."""
