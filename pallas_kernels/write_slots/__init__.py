"""Tokens into given slots, in place."""
