"""`ckptd status`."""
