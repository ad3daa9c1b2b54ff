"""Format what the daemon reports for people and machines: status, events, metrics, logs, audit."""
