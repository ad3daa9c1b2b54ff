"""Plan what is uploaded, kept and deleted: a view goes in, a plan comes out."""
