"""What is told of a run while it goes on and after it."""

import io
import time

import pytest

from kvjax.decoding.events import Progress
from kvjax.errors import UsageError
from kvjax.report import progress as progress_module
from kvjax.report.answers import Answers
from kvjax.report.footer import footer
from kvjax.report.process import process_start
from kvjax.report.progress import ProgressLine, describe
from kvjax.report.units import rate, read_size, size, table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Sheet:
    """An output that is a string."""

    text = ""

    def write(self, text: str) -> None:
        self.text += text


def answer(name: int, text: str = "", **more) -> dict:
    return {"id": name, "text": text, "finish_reason": "stop", **more}


def test_answers_wait_for_those_before_them():
    sheet = Sheet()
    answers = Answers(sheet, "text", listed=True)
    answers.add(1, answer(1, "b"))
    assert sheet.text == ""
    answers.add(0, answer(0, "a\n"))
    assert sheet.text == "a\nb\n"


@pytest.mark.parametrize("form", ["text", "jsonl", "json"])
def test_answers_do_not_wait_for_one_that_never_comes(form):
    sheet = Sheet()
    answers = Answers(sheet, form, listed=True)
    answers.add(3, answer(3, "d"))
    answers.add(1, answer(1, "b"))
    answers.finish()
    assert [record["id"] for record in answers.records] == [1, 3]
    assert "b" in sheet.text and "d" in sheet.text


@pytest.mark.parametrize(("pieces", "written"), [(["a", "b"], "ab\n"), (["a\n", ""], "a\n")])
def test_a_streamed_answer_is_written_once(pieces, written):
    sheet = Sheet()
    answers = Answers(sheet, "text", listed=False)
    for piece in pieces:
        answers.stream(piece)
    answers.add(0, answer(0, "".join(pieces)))
    answers.finish()
    assert sheet.text == written


def record(reason: str = "stop", think: int = 0) -> dict:
    return {
        "finish_reason": reason,
        "usage": {"prompt": 100, "generated": 50, "think": think},
        "timing": {"load_s": 1.5, "prefill_s": 0.5, "decode_tok_s": 25.0},
        "memory": {"peak_bytes": 3 << 29},
        "kv": {
            "method": "full",
            "logical_tokens": 150,
            "live_tokens": {"max": 80.0, "end": 75.0},
            "evictions": 0,
            "bytes": {"total_live": 2048, "full_bf16": 4096},
        },
    }


def test_the_footer_of_one_answer():
    text = footer([record("length", 20)], first_token_s=2.0, compile_s=3.0, decode_s=9.0)
    assert text.splitlines() == [
        "prompt 100 tokens, 200.0 tok/s · generated 50 tokens (20 thinking, 30 answer), "
        "25.0 tok/s · length",
        "first token 2.00 s after start · load 1.50 s · compile 3.00 s · prefill 0.50 s · "
        "peak memory 1.50 GiB",
        "cache full: live 75 of 150 tokens · 2.00 KiB · 0.500 of a bare bf16 cache",
    ]


def test_the_footer_counts_evictions():
    evicting = record()
    evicting["kv"] |= {"method": "h2o", "evictions": 1200}
    text = footer([evicting, evicting], first_token_s=None, compile_s=3.0, decode_s=4.0)
    assert text.splitlines()[-1] == (
        "cache h2o: live 150 of 300 tokens · 4.00 KiB · 0.500 of a bare bf16 cache · "
        "2,400 evictions in all layers and heads"
    )


def test_the_footer_of_many_answers_sums_them():
    records = [record(), answer(2, error="bad") | {"finish_reason": "error"}, record()]
    text = footer(records, first_token_s=None, compile_s=3.0, decode_s=4.0)
    first, times, cache = text.splitlines()
    assert first == ("3 prompts, 200 tokens · generated 100 tokens, 25.0 tok/s · 2 stop, 1 error")
    assert not times.startswith("first token")
    assert "live 150 of 300 tokens · 4.00 KiB · 0.500" in cache


def test_progress_names_tokens_speed_and_bytes():
    state = Progress(1234, 32768, 61.04, 1024, 11870, 225485783, 2576980378)
    assert describe("decode", state) == (
        "decode · token 1,234/32,768 · 61.0 tok/s · live 1,024/11,870 tokens · "
        "215.04 MiB (full 2.40 GiB)"
    )


def test_a_terminal_gets_one_line_that_is_cleared(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()
    line = ProgressLine(terminal, enabled=True)
    line.phase("loading")
    line.phase("prefill")
    line.update("x" * 50)
    line.clear()
    shown = terminal.getvalue()
    assert "\n" not in shown
    assert shown.startswith("\rloading · 0.0 s\x1b[K")
    assert shown.endswith("\rprefill · 0.0 s\x1b[K\r" + "x" * 19 + "\x1b[K\r\x1b[K")


def test_a_phase_counts_its_seconds(monkeypatch):
    monkeypatch.setattr(progress_module, "REDRAW_S", 0.01)
    terminal = Terminal()
    line = ProgressLine(terminal, enabled=True)
    line.phase("loading")
    time.sleep(0.3)
    line.clear()
    assert "loading · 0.1 s" in terminal.getvalue()


def test_nothing_is_drawn_where_text_is_streamed():
    terminal = Terminal()
    line = ProgressLine(terminal, enabled=True)
    line.phase("loading")
    line.retire()
    before = terminal.getvalue()
    line.phase("decode")
    line.update("state")
    line.clear()
    assert terminal.getvalue() == before


def test_a_file_gets_a_line_now_and_then(monkeypatch):
    file = io.StringIO()
    line = ProgressLine(file, enabled=True)
    line.phase("loading")
    line.update("soon")
    assert file.getvalue() == ""
    monkeypatch.setattr(progress_module, "LOG_S", 0.0)
    line.update("later")
    line.clear()
    assert file.getvalue() == "kvjax: later\n"


def test_quiet_draws_nothing():
    terminal = Terminal()
    line = ProgressLine(terminal, enabled=False)
    line.phase("loading")
    line.update("state")
    line.clear()
    assert terminal.getvalue() == ""


def test_units():
    assert [size(n) for n in (0, 1023, 1024, 3 << 29)] == [
        "0 bytes",
        "1023 bytes",
        "1.00 KiB",
        "1.50 GiB",
    ]
    assert rate(10, 4) == "2.5 tok/s" and rate(10, 0) == "- tok/s"
    assert table([("a", "1"), ("bcd", "2")]) == "a    1\nbcd  2"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("123456", 123456),
        ("64MiB", 64 << 20),
        ("1.5 GiB", 3 << 29),
        ("2g", 2 << 30),
        ("512KiB", 512 << 10),
        ("2GB", 2 * 10**9),
        ("100b", 100),
        ("1T", 1 << 40),
    ],
)
def test_sizes_are_read(text, count):
    assert read_size(text, "--memory") == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 XiB", "0", "0.1", "1e9", "nan", "1GiB2"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError, match="--memory must be a size like 64MiB"):
        read_size(text, "--memory")


def test_the_process_started_a_while_ago():
    age = time.time() - process_start()
    assert 0 < age < 24 * 3600
