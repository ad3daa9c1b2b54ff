"""A `torch.save` archive as byte ranges, read and written without torch (docs/formats.md §3)."""
