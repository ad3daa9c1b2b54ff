"""Many nodes and one job, simulated: `python -m tests.fleet` (docs/adr/0105)."""
