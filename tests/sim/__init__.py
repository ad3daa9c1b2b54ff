"""Deterministic simulation: one seed is one whole life of a node, its daemon, its trainer and its remotes."""
