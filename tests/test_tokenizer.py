import itertools
import json
import pathlib
import random
import re
import subprocess
import sys

import pytest
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from kvjax import tokenizer as tokenizers
from kvjax.errors import ModelError, UsageError
from kvjax.tokenizer import Tokenizer
from kvjax.weights.gguf import GGUFCheckpoint
from kvjax.weights.gguf_tokenizer import build_tokenizer
from tests import smollm2

GOLDEN = pathlib.Path(__file__).parent / "golden"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = CHATML.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}",
)
R1 = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
TEXTS = [
    "Hello, world! It's   12345 o'clock\n\n  and\tso on. ",
    "naïve e\u0301 Å 你好世界 😀👩‍👩‍👧‍👦 ½ ² Ⅷ ٣",
    "DON'T we'LL\r\n\r\nx==y  \n",
    "",
]


def alphabet() -> list[str]:
    """How byte-level vocabularies spell the bytes, in order: printable ones as themselves."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(rest)) for byte in range(256)]


def byte_level(pre="gpt-2", joins=(), template=None, **fields) -> dict:
    """Metadata of a vocabulary of 4 control tokens, 2 user-defined ones, all bytes, and merges."""
    whole = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    tokens = [*whole, *alphabet(), *(left + right for left, right in joins)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 4
        + [USER_DEFINED] * 2
        + [NORMAL] * (len(tokens) - 6),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in joins],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    } | {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    return metadata | ({"tokenizer.chat_template": template} if template else {})


def make(*args, **fields) -> Tokenizer:
    return tokenizers.from_gguf("test", byte_level(*args, **fields))


def sentencepiece(seed: int, letters: str = "abc▁", count: int = 120, **fields) -> dict:
    """Metadata of a random SentencePiece vocabulary, each token joined from two earlier ones."""
    rng = random.Random(seed)
    pieces = list(letters)
    while len(pieces) < count:
        joined = rng.choice(pieces[:40]) + rng.choice(pieces[:40])
        if joined not in pieces:
            pieces.append(joined)
    whole = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": whole + pieces,
        "tokenizer.ggml.scores": [0.0] * len(whole) + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL]
        + [BYTE] * 256
        + [NORMAL] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def join_by_score(metadata: dict, text: str) -> list[int]:
    """SentencePiece's own procedure: join the best-scored neighbours, the leftmost first."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {token: index for index, token in enumerate(tokens)}
    scores = metadata["tokenizer.ggml.scores"]
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (scores[ids[a + b]], -i)
            for i, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in ids
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    spelled = [[ids[p]] if p in ids else [3 + byte for byte in p.encode()] for p in parts]
    return [index for piece in spelled for index in piece]


# --- SmolLM2 ---


@pytest.fixture(scope="module")
def smol() -> Tokenizer:
    checkpoint = GGUFCheckpoint(smollm2.path())
    return tokenizers.from_gguf(checkpoint.source, checkpoint.metadata)


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads((GOLDEN / "smollm2.json").read_text())


def test_smollm2_ids_as_transformers_gives_them(smol, record):
    assert len(record["texts"]) >= 20
    for text, ids in zip(record["texts"], record["ids"], strict=True):
        assert smol.encode(text) == ids, text
    assert smol.encode(record["prompt"]) == record["prompt_ids"]


def test_smollm2_chat_as_transformers_renders_it(smol, record):
    for messages, ids in zip(record["messages"], record["chat_ids"], strict=True):
        assert smol.encode_chat(messages) == ids


def test_smollm2_stops_at_the_end_of_its_turn(smol):
    assert smol.stop_ids == (2,)
    assert smol.encode("<|im_end|>") == [2]


def test_smollm2_splits_every_digit(smol):
    """Its own tokenizer does; transformers' GGUF loader splits as GPT-2 and differs here."""
    backend = smol._backend
    pieces = [backend.id_to_token(index) for index in smol.encode("a  12 ²")]
    assert pieces == ["a", "ĠĠ", "1", "2", "Ġ", "Â²"]


def test_smollm2_round_trip(smol, record):
    for text in [*record["texts"], *TEXTS]:
        if "<|" not in text:
            assert smol.decode(smol.encode(text)) == text


# --- byte-level vocabularies ---


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "it's  123 x", ["it", "'s", " ", " 123", " x"]),
        ("smollm", "it's  123 x", ["it", "'s", "  ", "1", "2", "3", " x"]),
        ("smollm", " 1\n2½", [" ", "1", "\n", "2", "½"]),
        ("qwen2", "IT'S  123 x\n\n y", ["IT", "'S", " ", " ", "1", "2", "3", " x", "\n\n", " y"]),
        ("deepseek-r1-qwen", "(ab 12", ["(ab", " ", "1", "2"]),
        ("llama-bpe", "it's 12345 x!\n", ["it", "'s", " ", "123", "45", " x", "!\n"]),
        ("llama3", "١٢٣٤", ["١٢٣", "٤"]),
    ],
)
def test_text_is_cut_as_the_vocabulary_was_learned(pre, text, pieces):
    split = build_tokenizer("test", byte_level(pre)).tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in split] == pieces


def test_qwen2_as_transformers_own_class_gives_it():
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("Ġ", "w"), ("1", "2"), ("Ã", "©")]
    metadata = byte_level("qwen2", merges)
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    theirs = Qwen2Tokenizer(
        vocab=vocab, merges=merges, unk_token="<|eos|>", eos_token="<|eos|>", pad_token="<|eos|>"
    )
    ours = tokenizers.from_gguf("test", metadata)
    for text in [*TEXTS, "hello world 12 é e\u0301"]:
        assert ours.encode(text) == theirs(text)["input_ids"], text


def test_llama3_takes_whole_words_without_merging():
    merges = [("b", "c"), ("a", "b"), ("ab", "c")]  # by merges alone, abc would become a, bc
    ids = make("llama-bpe", merges, add_bos_token=False).encode("abc")
    assert ids == [6 + 256 + 2]
    assert make("gpt-2", merges).encode("abc") == [6 + ord("a"), 6 + 256]


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_byte_level_round_trip(pre):
    tokenizer = make(pre, add_bos_token=False)
    for text in TEXTS:
        expected = text.replace("e\u0301", "é") if pre == "qwen2" else text
        assert tokenizer.decode(tokenizer.encode(text)) == expected


def test_control_and_user_defined_tokens_are_whole():
    tokenizer = make()
    ids = tokenizer.encode("a<|im_start|>b<think>c</think><|im_end|>")
    a = 6 + ord("a")
    assert ids == [a, 2, a + 1, 4, a + 2, 5, 3]
    assert tokenizer.decode(ids) == "ab<think>c</think>"


@pytest.mark.parametrize("pre", ["default", "gpt-4o", "tekken", None, 3, [], ["gpt-2"]])
def test_other_pre_tokenizers_are_refused_by_name(pre):
    with pytest.raises(ModelError, match=rf"test: .*pre {re.escape(repr(pre))} is not supported"):
        make(pre)


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", None])
def test_other_kinds_are_refused_by_name(model):
    with pytest.raises(ModelError, match=rf"tokenizer\.ggml\.model {model!r} is not supported"):
        make(model=model)


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": None},
        {"tokens": "abc"},
        {"tokens": [1, 2]},
        {"merges": None},
        {"merges": ["a"]},
        {"merges": ["a b c"]},
        {"merges": ["zz yy"]},
        {"token_type": "x"},
        {"eos_token_id": 10_000},
        {"bos_token_id": -1},
        {"eot_token_id": "x"},
    ],
)
def test_damaged_metadata(fields):
    with pytest.raises(ModelError, match=r"^test: ") as error:
        make(**fields)
    assert "\n" not in str(error.value)


# --- SentencePiece vocabularies ---


@pytest.mark.parametrize("seed", range(4))
def test_sentencepiece_joins_by_score(seed):
    metadata = sentencepiece(seed)
    tokenizer, rng = tokenizers.from_gguf("test", metadata), random.Random(seed)
    for _ in range(200):
        text = "".join(rng.choices("abc  é😀", k=rng.randrange(1, 30)))
        assert tokenizer.encode(text) == [1, *join_by_score(metadata, text)], text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_without_the_leading_space():
    tokenizer = tokenizers.from_gguf("test", sentencepiece(0, add_space_prefix=False))
    for text in ("a", " a", "  ab c"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("a")) == 2


# --- BOS ---


@pytest.mark.parametrize(
    ("pre", "fields", "bos"),
    [
        ("gpt-2", {}, False),
        ("gpt-2", {"add_bos_token": True}, True),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("gpt-2", {"add_bos_token": True, "bos_token_id": None}, False),
    ],
)
def test_one_bos_where_the_model_wants_one(pre, fields, bos):
    tokenizer = make(pre, **fields)
    assert tokenizer.encode("a") == [0] * bos + [6 + ord("a")]
    assert tokenizer.encode("<|bos|>a") == [0, 6 + ord("a")]
    assert tokenizer.encode("") == [0] * bos


@pytest.mark.parametrize("written", [True, False])
def test_one_bos_whether_the_template_writes_it_or_not(written):
    template = "{{ bos_token }}" * written + CHATML
    ids = make("llama-bpe", template=template).encode_chat([{"role": "user", "content": "a"}])
    assert ids[:2] == [0, 2]
    assert ids.count(0) == 1


SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are.<|im_end|>\n{% endif %}"


@pytest.mark.parametrize("template", [CHATML, R1, SYSTEM + CHATML])
@pytest.mark.parametrize("ended", [True, False])
def test_the_next_turn_is_what_the_template_puts_behind_an_answer(template, ended):
    """Together with what was read and said before, it is the conversation at once."""
    tokenizer = make("llama-bpe", template=template)
    first, second = ({"role": "user", "content": text} for text in ("Hi", "And @@kvjax@@?"))
    start = tokenizer.encode_chat([first])
    said = tokenizer.encode("yes<|im_end|>" if ended else "yes", starts=False)
    turn = tokenizer.encode_turn([second], after=said[-1])
    thinks = "<think>\n" * (template == R1)
    answer = {"role": "assistant", "content": thinks + "yes"}
    assert [*start, *said, *turn] == tokenizer.encode_chat([first, answer, second])
    text = tokenizer._backend.decode(turn, skip_special_tokens=False)
    assert "You are." not in text and "<|bos|>" not in text


def test_a_template_without_answers_has_no_next_turn():
    tokenizer = make(template="{{ messages[-1].content }}")
    with pytest.raises(UsageError, match="shows no answers"):
        tokenizer.encode_turn([{"role": "user", "content": "a"}], after=0)


@pytest.mark.parametrize("thinking", [True, False])
def test_thinking_is_switched_in_a_turn_too(thinking):
    tokenizer = make(template=QWEN3)
    ids = tokenizer.encode_turn([{"role": "user", "content": "a"}], after=0, thinking=thinking)
    assert (
        ids[-4:]
        == tokenizer.encode_chat([{"role": "user", "content": "a"}], thinking=thinking)[-4:]
    )
    with pytest.raises(UsageError, match="thinking cannot be turned"):
        make(template=CHATML).encode_turn(
            [{"role": "user", "content": "a"}], after=0, thinking=True
        )


def save(tokenizer: Tokenizer, directory: pathlib.Path) -> pathlib.Path:
    tokenizer._wrapped.save_pretrained(directory)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    return directory


def test_a_directory_gives_the_same_tokenizer(tmp_path):
    original = make("qwen2", [("h", "e")], template=CHATML)
    loaded = tokenizers.from_directory(save(original, tmp_path))
    for text in [*TEXTS, "he<|im_end|><think>he"]:
        assert loaded.encode(text) == original.encode(text)
    messages = [{"role": "user", "content": "hehe"}]
    assert loaded.encode_chat(messages) == original.encode_chat(messages)
    assert loaded.stop_ids == original.stop_ids == (1, 3)
    assert loaded.vocab_size == original.vocab_size == 6 + 256 + 1


def test_a_directory_whose_tokenizer_adds_bos_and_eos_itself(tmp_path):
    from tokenizers.processors import TemplateProcessing

    original = make("gpt-2", template="{{ bos_token }}" + CHATML)
    original._backend.post_processor = TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", 0), ("<|eos|>", 1)]
    )
    save(original, tmp_path)
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    stored["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    loaded = tokenizers.from_directory(tmp_path)
    assert loaded.encode("abcdefgh") == [0, *(6 + ord(letter) for letter in "abcdefgh")]
    assert loaded.encode_chat([{"role": "user", "content": "a"}])[:2] == [0, 2]


def test_a_directory_without_a_tokenizer(tmp_path):
    assert tokenizers.from_directory(tmp_path) is None


# --- chat templates ---


def test_end_of_turn_and_every_end_in_the_metadata_stop():
    tokenizer = make(template=CHATML, eot_token_id=3, eom_token_id=2)
    assert tokenizer.stop_ids == (1, 2, 3)
    assert make(template=CHATML).stop_ids == (1, 3)
    assert make().stop_ids == (1,)


def test_padding_stops_where_it_is_no_ordinary_token():
    """As Qwen2.5's <|endoftext|> does; 0 for "none" may be a letter."""
    assert make(padding_token_id=0).stop_ids == (0, 1)
    assert make(padding_token_id=7).stop_ids == (1,)


def test_a_token_that_only_ends_earlier_turns_does_not_stop():
    """As in GPT-OSS, whose turns end in one token and whose answers end in another."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if loop.last and not add_generation_prompt %}<|eos|>{% else %}<|im_end|>{% endif %}"
        "{% endfor %}"
    )
    assert make(template=template).stop_ids == (1,)


def test_a_template_that_does_not_mark_the_end_of_turn():
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert make(template=template).stop_ids == (1,)


@pytest.mark.parametrize(
    ("template", "thinking", "opened"),
    [
        (QWEN3, None, False),
        (QWEN3, True, False),
        (QWEN3, False, False),
        (R1, None, True),
        (R1, True, True),
        (CHATML, None, False),
        (CHATML, False, False),
    ],
)
def test_thinking(template, thinking, opened):
    tokenizer = make(template=template)
    ids = tokenizer.encode_chat([{"role": "user", "content": "what is <think>"}], thinking=thinking)
    assert tokenizer.thinking_open(ids) == opened
    closed = tokenizer._backend.decode(ids, skip_special_tokens=False).endswith("</think>\n\n")
    assert closed == (template == QWEN3 and thinking is False)


@pytest.mark.parametrize(("template", "thinking"), [(CHATML, True), (R1, False)])
def test_thinking_that_the_template_cannot_do(template, thinking):
    with pytest.raises(UsageError, match="no switch"):
        make(template=template).encode_chat([{"role": "user", "content": "a"}], thinking=thinking)


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('roles must alternate') }}", "{% if", "{{ messages[9].x.y }}"]
)
def test_a_template_that_refuses(template):
    with pytest.raises(UsageError, match="the chat template refuses the messages"):
        make(template=template).encode_chat([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 1 // 0 }}", "fails .ZeroDivisionError: "),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails .RecursionError: "),
        ("{{" + "(" * 3000 + "1" + ")" * 3000 + "}}", "fails .RecursionError: "),
        ("{{ 'a' * 10**15 }}", "fails .MemoryError: "),
        ("{{ 'a' * 10**30 }}", "fails .OverflowError: "),
        ("{% break %}", "fails .SyntaxError: "),
        ("{{ 'a' * 2**21 }}", "adds 2,097,152 characters, more than 1,048,576; "),
    ],
)
def test_a_damaged_template_is_the_models_fault(template, message):
    """And met where it is used alone: plain text needs none."""
    tokenizer = make(template=template)
    assert tokenizer.stop_ids == (1,) and tokenizer.encode("a") == [6 + ord("a")]
    with pytest.raises(
        ModelError, match=f"^the chat template {message}.*--no-chat-template"
    ) as error:
        tokenizer.encode_chat([{"role": "user", "content": "a"}])
    assert error.value.exit_code == 3 and "\n" not in str(error.value)


def test_a_long_prompt_is_no_damage():
    content = "a" * (2**20 + 1)
    assert len(make(template=CHATML).encode_chat([{"role": "user", "content": content}])) > 2**20


def test_a_template_that_makes_no_text():
    tokenizer = make(template=r"{{ '\ud800' }}")
    with pytest.raises(UsageError, match="not valid Unicode"):
        tokenizer.encode_chat([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("template", [3, ["{{ 1 }}"], {"default": "{{ 1 }}"}, True])
def test_a_template_that_is_no_text(template):
    with pytest.raises(ModelError, match=r"^test: metadata tokenizer\.chat_template is a "):
        make(template=template)


def test_no_template():
    tokenizer = make()
    assert not tokenizer.has_chat_template
    with pytest.raises(UsageError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "a"}])


def test_text_that_is_not_unicode():
    with pytest.raises(UsageError, match="not valid Unicode"):
        make().encode("a\ud800")


# --- streaming ---


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.push([index]) for index in ids), detokenizer.flush()]


def kinds() -> list[Tokenizer]:
    metadata = [byte_level(joins=[("Ã", "©"), ("ð", "Ł")]), sentencepiece(1)]
    metadata.append(sentencepiece(2, add_space_prefix=False))
    return [tokenizers.from_gguf("test", m) for m in metadata]


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_pieces_join_to_the_whole(kind):
    tokenizer, rng = kinds()[kind], random.Random(kind)
    for trial in range(600):
        pool = [*range(tokenizer.vocab_size), -1] if trial % 2 else range(0, 300)
        ids = [rng.choice(pool) for _ in range(rng.randrange(0, 40))]
        ids = [tokenizer.vocab_size + 5 if index < 0 else index for index in ids]
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids), ids


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("text", ["😀👩‍👩‍👧‍👦 a", "你好世界。", "é́", "a b  c   ", "naïve 😀"])
def test_no_piece_shows_half_a_character(kind, text):
    tokenizer = kinds()[kind]
    pieces = stream(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_whole_characters_come_at_once():
    tokenizer = make()
    pieces = stream(tokenizer, tokenizer.encode("a😀b"))
    assert pieces == ["a", "", "", "", "😀", "b", ""]


def test_half_a_character_at_the_end_is_shown_as_decode_shows_it():
    tokenizer = make()
    ids = tokenizer.encode("a😀")[:-1]
    assert stream(tokenizer, ids) == ["a", "", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_special_tokens_in_the_middle_of_a_character():
    tokenizer = make()
    ids = tokenizer.encode("😀")
    ids[2:2] = [3, 1]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == "😀"


def test_one_push_of_many_tokens():
    tokenizer = make()
    ids = tokenizer.encode("naïve 😀 text")
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push(ids[:9]) + detokenizer.push(ids[9:]) == "naïve 😀 text"
    assert detokenizer.flush() == ""


def test_smollm2_streams_what_it_decodes(smol, record):
    rng = random.Random(0)
    for text in record["texts"]:
        ids = smol.encode(text)
        assert "".join(stream(smol, ids)) == smol.decode(ids)
    for _ in range(300):
        ids = [rng.randrange(smol.vocab_size) for _ in range(30)]
        assert "".join(stream(smol, ids)) == smol.decode(ids)


def test_silent_and_without_pytorch():
    program = (
        "import sys; from kvjax import tokenizer;"
        f"tokenizer.from_gguf('x', {byte_level()!r}); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=pathlib.Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
