"""The words of the reasoner's language, one token each."""

import itertools
import string

PAD, BOS, EOS, UNKNOWN, BREAK = range(5)
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
PARAGRAPH = "\n\n"
_SIGNS = "= + - * . , : ?"
_WORDS = (
    "Given Notes none should be Question find for the answer We need So far is To get use Recall "
    "Find Now Yes Back to Wait say The last step wrong Let me redo this looks odd Check again"
)
NAMES = tuple(map("".join, itertools.product(string.ascii_lowercase, string.digits)))
MODULUS = 100
WORDS = (
    *SPECIAL,
    PARAGRAPH,
    *_SIGNS.split(),
    *_WORDS.split(),
    *NAMES,
    *map(str, range(MODULUS)),
)
IDS = {word: index for index, word in enumerate(WORDS)}
SIZE = 448
"""Rows of the embedding: the words, and a few that are never used, up to a multiple of 64."""


def encode(text: str) -> list[int]:
    """Ids of a text whose words are separated by single spaces.

    Raises:
        KeyError: a word that is not in the vocabulary.
    """
    return [IDS[word] for word in text.split(" ")]


def decode(ids) -> str:
    """The text that `encode` takes."""
    return " ".join(WORDS[index] for index in ids)
