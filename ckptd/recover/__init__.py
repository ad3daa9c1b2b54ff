"""Bring committed checkpoints back: resume and restore."""
