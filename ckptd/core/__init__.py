"""Pure decisions: no files, clock, network or threads (docs/design.md §7)."""
