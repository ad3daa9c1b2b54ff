"""Job files: schema, loader, quantities, and what is wrong with one in words."""
