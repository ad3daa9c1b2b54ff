"""The node's disk: listing, hints, deletion with a permit."""
