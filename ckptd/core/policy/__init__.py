"""A view goes in, a plan comes out: what is uploaded, kept, deleted."""
