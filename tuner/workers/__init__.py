"""A device in a process of its own, and who replaces it when it dies."""
