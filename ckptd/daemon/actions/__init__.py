"""Carry out what a plan or a person asks on this node: deletions, conversions, pauses and drains."""
