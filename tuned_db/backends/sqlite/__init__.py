"""A database in a file, which a stranger may have written."""
