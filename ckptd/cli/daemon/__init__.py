"""Verbs that run a daemon or ask it for something."""
