"""The loop, its one deciding thread, and the life of a job."""
