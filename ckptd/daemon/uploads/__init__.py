"""Remote sessions and what is moved to remotes."""
