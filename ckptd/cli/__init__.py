"""The command line: one file per verb; parse, call, print."""
