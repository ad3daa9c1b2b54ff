"""What others see of the daemon: status, logs, notifications to the service manager."""
