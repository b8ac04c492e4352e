"""Alembic's scripts. `migrate.py` runs them on an open connection; there is no alembic.ini.

A change of `models.py` needs the next ``versions/vNNNN_<what>.py`` and ``SCHEMA_VERSION`` raised by one.
"""
