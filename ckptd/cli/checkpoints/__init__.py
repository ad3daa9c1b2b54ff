"""Verbs about checkpoints."""
