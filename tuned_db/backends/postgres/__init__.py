"""A team's database on a PostgreSQL server."""
