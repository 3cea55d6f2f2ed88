"""The tokenizer that a GGUF file's metadata describes, built with the ``tokenizers`` package."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from kvjax.errors import ModelError

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_SPACE = "▁"  # how SentencePiece spells a space
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_SPACES = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True)
class _Splitting:
    """How a byte-level vocabulary's training text was cut before merges were learned.

    Attributes:
        pattern: the pieces, None for GPT-2's own pattern.
        single_digits: cut every digit off first.
        nfc: compose characters first.
        whole_words: a piece that is a token is taken as it is, whatever the merges say.
        bos: a BOS is written unless the file says otherwise.
    """

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    bos: bool = False


_QWEN2 = _Splitting(f"{_CONTRACTIONS}|{_WORDS_AND_SPACES % r'\p{N}'}", nfc=True)
_LLAMA3 = _Splitting(
    f"{_CONTRACTIONS}|{_WORDS_AND_SPACES % r'\p{N}{1,3}'}", whole_words=True, bos=True
)
_SPLITTINGS = {
    "gpt-2": _Splitting(),
    "smollm": _Splitting(single_digits=True),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}


@dataclasses.dataclass(frozen=True)
class GGUFTokenizer:
    """A tokenizer and what the metadata says about its use."""

    tokenizer: Tokenizer
    add_bos: bool
    special: dict[str, str]  # bos_token, eos_token, unk_token and pad_token, where there are any
    stop_ids: tuple[int, ...]
    chat_template: str | None


def build_tokenizer(source: str, metadata: Mapping[str, Any]) -> GGUFTokenizer:
    """Read the tokenizer out of a GGUF file's metadata.

    Raises:
        ModelError: the metadata is incomplete or describes a tokenizer that is not supported.
    """
    fields = {k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items()}
    tokens = _list(source, fields, "tokens", str)
    kind = fields.get("model")
    if kind == "gpt2":
        splitting = _splitting(source, fields.get("pre"))
        tokenizer, bos = _byte_level(source, tokens, fields, splitting), splitting.bos
    elif kind == "llama":
        tokenizer, bos = _sentencepiece(source, tokens, fields), True
    else:
        raise ModelError(
            f"{source}: tokenizer.ggml.model {kind!r} is not supported, expected gpt2 or llama; "
            "pass the model's tokenizer directory or hub id as the tokenizer"
        )
    _add_whole_tokens(source, tokenizer, tokens, fields)
    ids = {name: _token_id(source, fields, f"{name}_token_id", len(tokens)) for name in _ROLES}
    ends = [ids[name] for name in ("eos", "eot", "eom")]
    # No text goes on behind a padding token: it is what ends a document in Qwen2.5's vocabulary,
    # whose eos ends a turn. But a file may name an ordinary token by mistake, 0 for "none".
    if ids["padding"] in _of_kind(source, fields, _CONTROL, len(tokens)):
        ends.append(ids["padding"])
    return GGUFTokenizer(
        tokenizer=tokenizer,
        add_bos=bool(fields.get("add_bos_token", bos)) and ids["bos"] is not None,
        special={key: tokens[ids[n]] for n, key in _ROLES.items() if key and ids[n] is not None},
        stop_ids=tuple(index for index in ends if index is not None),
        chat_template=_chat_template(source, metadata),
    )


# GGUF's name of a special token's id -> transformers' name of that token.
_ROLES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "eot": None,
    "eom": None,
}


def _list(source: str, fields: Mapping[str, Any], key: str, kind: type) -> list:
    values = fields.get(key)
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ModelError(
            f"{source}: metadata tokenizer.ggml.{key} is missing or no list of {kind.__name__}; "
            "pass the model's tokenizer directory or hub id as the tokenizer"
        )
    return values


def _token_id(source: str, fields: Mapping[str, Any], key: str, count: int) -> int | None:
    value = fields.get(key)
    if value is not None and not (isinstance(value, int) and 0 <= value < count):
        raise ModelError(
            f"{source}: metadata tokenizer.ggml.{key} is {value!r}, outside the {count} tokens"
        )
    return value


def _chat_template(source: str, metadata: Mapping[str, Any]) -> str | None:
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelError(
            f"{source}: metadata tokenizer.chat_template is a {type(template).__name__}, expected "
            "a text; pass the model's tokenizer directory or hub id as the tokenizer"
        )
    return template


def _splitting(source: str, name: Any) -> _Splitting:
    if not isinstance(name, str) or name not in _SPLITTINGS:
        raise ModelError(
            f"{source}: tokenizer.ggml.pre {name!r} is not supported, expected one of "
            f"{', '.join(_SPLITTINGS)}; pass the model's tokenizer directory or hub id as the "
            "tokenizer"
        )
    return _SPLITTINGS[name]


def _model(source: str, tokens: list[str], merges: list[tuple[str, ...]], **options) -> Tokenizer:
    try:
        vocab = {token: index for index, token in enumerate(tokens)}
        return Tokenizer(BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # the package raises nothing narrower
        raise ModelError(f"{source}: tokens and merges do not fit together: {error}") from error


def _byte_level(
    source: str, tokens: list[str], fields: Mapping[str, Any], splitting: _Splitting
) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in _list(source, fields, "merges", str)]
    if wrong := next((merge for merge in merges if len(merge) != 2), None):
        raise ModelError(f"{source}: metadata tokenizer.ggml.merges holds {wrong}, expected a pair")
    tokenizer = _model(source, tokens, merges, ignore_merges=splitting.whole_words)
    if splitting.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps = []
    if splitting.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.pattern:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    own_pattern = splitting.pattern is None
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own_pattern))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(source: str, tokens: list[str], fields: Mapping[str, Any]) -> Tokenizer:
    scores = _list(source, fields, "scores", float)
    if len(scores) != len(tokens):
        raise ModelError(f"{source}: {len(scores)} scores for {len(tokens)} tokens")
    unknown = _token_id(source, fields, "unknown_token_id", len(tokens))
    tokenizer = _model(
        source,
        tokens,
        _merges_by_score(tokens, scores),
        byte_fallback=True,
        fuse_unk=True,
        unk_token=None if unknown is None else tokens[unknown],
    )
    prefix = bool(fields.get("add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    first = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*first, spaces])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(content=" ", left=1)] if prefix else [])
    )
    return tokenizer


def _merges_by_score(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose joined token scores best."""
    known = {token: score for token, score in zip(tokens, scores, strict=True)}
    merges = [
        (-score, len(token), token[:cut], token[cut:])
        for token, score in known.items()
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    return [(left, right) for _, _, left, right in sorted(merges)]


def _of_kind(source: str, fields: Mapping[str, Any], kind: int, count: int) -> list[int]:
    """Which of so many tokens are of a kind, as far as the file tells kinds."""
    kinds = _list(source, fields, "token_type", int) if "token_type" in fields else []
    return [index for index, of in enumerate(kinds[:count]) if of == kind]


def _add_whole_tokens(
    source: str, tokenizer: Tokenizer, tokens: list[str], fields: Mapping[str, Any]
) -> None:
    """Control and user-defined tokens are found in text as they stand and never cut."""
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(tokens[index], normalized=False, special=special)
            for index in _of_kind(source, fields, kind, len(tokens))
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
