"""Installing ckptd as a service of systemd, and taking it away again."""
