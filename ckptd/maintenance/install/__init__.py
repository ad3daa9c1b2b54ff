"""Install and uninstall the service of systemd."""
