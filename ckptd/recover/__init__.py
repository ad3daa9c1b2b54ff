"""The way back: list, resume."""
