"""Scan, watch and change the node's disk; delete by identity."""
