"""What a turn knows, and the planner's view of it."""
