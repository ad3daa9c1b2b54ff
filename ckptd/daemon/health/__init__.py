"""What is wrong now, and who is told."""
