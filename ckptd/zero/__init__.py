"""Which bytes of which rank make which parameter (docs/formats.md §2, §4)."""
