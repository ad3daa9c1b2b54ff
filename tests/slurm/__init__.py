"""examples/slurm on a real Slurm: its own munged, slurmctld and slurmds on this machine (`make slurm`)."""
