"""Byte stores: directories, SFTP, fsspec, S3."""
