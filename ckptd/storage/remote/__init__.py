"""What ckptd keeps in a remote: documents, commits, deletions."""
