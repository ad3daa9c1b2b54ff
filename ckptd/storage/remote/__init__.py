"""Read and write what ckptd keeps in a remote: documents, commits, leases, deletions."""
