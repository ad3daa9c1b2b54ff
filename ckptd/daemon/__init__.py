"""The daemon: one deciding thread, workers at the edge."""
