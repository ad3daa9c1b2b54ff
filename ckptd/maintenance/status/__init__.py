"""What `ckptd status` says: where a status is published, how it is read and judged, and its words."""
