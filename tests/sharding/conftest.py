from tests.decoding.conftest import text_lm, tokenizer

__all__ = ["text_lm", "tokenizer"]
