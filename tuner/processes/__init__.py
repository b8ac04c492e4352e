"""Processes that end with the session; the compilers among them."""
