"""Attention over keys and values that are stored as components of a learned basis."""
