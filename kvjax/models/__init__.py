"""Decoders of the supported model families, as functions of their parameters and a cache."""
