"""An open database: statements, reading, writing, what was removed, what arrived."""
