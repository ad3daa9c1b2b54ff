"""Models: histories drawn by hypothesis, judged by promises, not by examples."""
