"""Attention matching: how the tokens that stay make up for those that go."""

from kvjax.matching.matching import AttentionMatching, Fitted

__all__ = ["AttentionMatching", "Fitted"]
