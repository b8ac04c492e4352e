"""Measurements that outlive a run: records, the store, look-up, exchange. The only importer of SQLAlchemy."""
