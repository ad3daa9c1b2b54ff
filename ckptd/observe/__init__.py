"""Formats for people and machines: status, events, metrics, logs, audit."""
