"""Load and judge job files: schema, loader, quantities, and error messages in words."""
