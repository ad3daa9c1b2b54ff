"""Store objects in S3."""
