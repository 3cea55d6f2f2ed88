"""Attention matching: how the tokens that stay make up for those that go."""

from kvjax.matching.head_budgets import head_budgets
from kvjax.matching.matching import AttentionMatching, Fitted
from kvjax.matching.measure import MatchErrors, match_errors

__all__ = ["AttentionMatching", "Fitted", "MatchErrors", "head_budgets", "match_errors"]
