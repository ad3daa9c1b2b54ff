"""What jobs share on a host: workers, limits, the disk."""
