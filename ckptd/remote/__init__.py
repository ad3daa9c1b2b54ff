"""Remotes: the store contract, directories, transfer, commit (docs/design.md §5)."""
