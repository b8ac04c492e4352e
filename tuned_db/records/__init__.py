"""Measurements as values, and what a value from anywhere may be."""
