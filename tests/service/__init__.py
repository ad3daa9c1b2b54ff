"""The service of systemd, run by a real systemd."""
