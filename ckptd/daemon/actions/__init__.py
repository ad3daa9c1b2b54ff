"""What is done on this node: deletions, conversions, requests of people."""
