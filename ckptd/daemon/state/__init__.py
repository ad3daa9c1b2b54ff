"""Hold what a turn knows of a job, and build the planner's view of it."""
