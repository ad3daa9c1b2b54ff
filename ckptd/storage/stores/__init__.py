"""Read and write bytes in stores: directories, SFTP, fsspec, S3."""
