"""Carrying a plan out on this node, in children that are given little."""
