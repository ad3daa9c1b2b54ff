"""Show the status of jobs as one HTML page: as a file, and live on 127.0.0.1 (docs/ui.md)."""
