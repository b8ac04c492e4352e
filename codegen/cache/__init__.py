"""The one way into the cache on disk, which its user alone may write."""
