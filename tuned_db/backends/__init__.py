"""Where the tables are: `sqlite/` a file that a stranger may have written, `postgres/` the server of a team."""
