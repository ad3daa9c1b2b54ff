"""The node's disk: scanning, watching, deleting by identity."""
