"""Values and documents: layouts, saves, manifests, COMMITs, runs."""
