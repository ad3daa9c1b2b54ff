"""Find a published status, read and judge it, and put it into words."""
