"""Devices of a Ray cluster."""
