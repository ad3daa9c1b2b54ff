"""Run one child process for each remote."""
