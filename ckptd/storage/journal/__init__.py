"""Keep the journal, in SQLite."""
