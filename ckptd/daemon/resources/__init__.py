"""Share a host's resources between jobs: workers, limits, the disk."""
