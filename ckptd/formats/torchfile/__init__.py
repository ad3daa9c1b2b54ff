"""torchfile."""
