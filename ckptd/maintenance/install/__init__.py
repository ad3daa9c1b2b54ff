"""The service of systemd: install and uninstall."""
