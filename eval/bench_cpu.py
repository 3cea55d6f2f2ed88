"""Tokens a second on a CPU, against transformers and PyTorch with the same weights and prompt.

    python -m kvjax.eval.bench_cpu --peer-python PYTHON --out eval/results/decode_cpu.json

SmolLM2-135M-Instruct, greedy, float32. PYTHON has torch, transformers, gguf and accelerate. Both
sides keep their model loaded and have decoded once before anything is timed; then they take turns.
A turn in which other processes used the cores noticeably is taken again at once: it is recorded,
and it is not among the figures. A token counts from the moment that its side hands it over.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence

import kvjax
from kvjax.eval.quiet import DISTURBED, Others, use_cores, wait_for_quiet
from kvjax.eval.record import run_record, write_json
from kvjax.fetch_model import default_model_path

PROMPT = "Write a short story about a lighthouse keeper and a lost whale, in two paragraphs."
PEER = pathlib.Path(__file__).with_name("peer_torch.py")


@dataclasses.dataclass(frozen=True)
class Answer:
    """One run of one side.

    Attributes:
        first_s: seconds from the call to the first token.
        total_s: seconds from the call to the last one.
    """

    tokens: list[int]
    first_s: float
    total_s: float

    def rates(self) -> dict[str, float]:
        """Tokens a second: after the first one, and of all from the call on."""
        count = len(self.tokens)
        return {
            "decode": (count - 1) / (self.total_s - self.first_s),
            "end_to_end": count / self.total_s,
        }


class Peer:
    """transformers and PyTorch in a process of their own.

    Attributes:
        versions: what it says of itself.
    """

    def __init__(self, python: str, model: pathlib.Path, threads: int):
        self._process = subprocess.Popen(
            [python, str(PEER), str(model), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.versions = self._read()

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *error) -> None:
        self._process.stdin.close()
        self._process.wait()

    def answer(self, ids: Sequence[int], new_tokens: int) -> Answer:
        print(
            json.dumps({"ids": list(ids), "new_tokens": new_tokens}),
            file=self._process.stdin,
            flush=True,
        )
        return Answer(**self._read())

    def _read(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{PEER} ended with {self._process.wait()}; run it by hand to see why")
        return json.loads(line)


def answer(lm: kvjax.LanguageModel, ids: Sequence[int], new_tokens: int) -> Answer:
    """kvjax's side: the command's own loop, its text included."""
    start = time.perf_counter()
    times, result = [], None
    events = kvjax.stream(lm, [ids], max_new_tokens=new_tokens, stop_ids=(), repetition_stop=False)
    for event in events:
        if event.tokens:
            times.append(time.perf_counter())
        result = event.result or result
    return Answer(list(result.tokens), times[0] - start, times[-1] - start)


@dataclasses.dataclass(frozen=True)
class Turn:
    """One side's answer, and the cores that other processes used meanwhile."""

    answer: Answer
    others: float

    @property
    def undisturbed(self) -> bool:
        return self.others < DISTURBED

    def as_dict(self) -> dict:
        return {
            "first_s": self.answer.first_s,
            "total_s": self.answer.total_s,
            **self.answer.rates(),
            "cores_used_by_others": self.others,
            "undisturbed": self.undisturbed,
        }


def in_turns(
    sides: dict[str, Callable[[], Answer]], repeats: int, pids: list[int], patience: float
) -> dict[str, list[Turn]]:
    """Every side's turns: one undisturbed turn of each, ``repeats`` times over.

    Fewer once ``patience`` seconds are over. Every side answers once before, with its compilation.
    """
    for side in sides.values():
        side()
    deadline = time.monotonic() + patience
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            while time.monotonic() < deadline:
                wait_for_quiet(pids, deadline)
                others = Others(pids)
                turn = Turn(side(), others.cores())
                turns[name].append(turn)
                decode = turn.answer.rates()["decode"]
                print(f"{name:6} {decode:6.1f} tok/s, others {turn.others:.2f} cores", flush=True)
                if turn.undisturbed:
                    break
    return turns


def summary(turns: list[Turn]) -> dict:
    """One side's medians over its undisturbed turns, beside all that was measured."""
    kept = [turn.answer for turn in turns if turn.undisturbed]
    if not kept:
        raise SystemExit("others were at work in every turn; run it again, or with more --patience")
    return {
        "median_tokens_per_s": {
            kind: statistics.median(one.rates()[kind] for one in kept) for kind in kept[0].rates()
        },
        "median_first_token_s": statistics.median(one.first_s for one in kept),
        "undisturbed": len(kept),
        "raw": [turn.as_dict() for turn in turns],
    }


def agreement(ours: list[int], theirs: list[int]) -> dict[str, int]:
    """How many tokens are the same, and how many before the first that is not."""
    same = [a == b for a, b in zip(ours, theirs, strict=True)]
    return {"tokens": len(same), "equal": sum(same), "equal_at_first": [*same, False].index(False)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", required=True, help="a Python with torch and transformers")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--patience", type=float, default=600, help="seconds to try for undisturbed turns"
    )
    parser.add_argument("--commit", help="of the code, where this runs outside a checkout")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the raw figures")
    return parser.parse_args()


def main() -> None:
    args = parse()
    path = default_model_path()
    if path is None:
        raise SystemExit("needs SmolLM2: python -m kvjax.fetch_model smollm2")
    cores = use_cores(args.threads)
    load_before = list(os.getloadavg())
    lm = kvjax.load(path)
    ids = lm.tokenizer.encode_chat([{"role": "user", "content": PROMPT}], thinking=None)
    with Peer(args.peer_python, path, args.threads) as peer:
        sides = {
            "kvjax": lambda: answer(lm, ids, args.new_tokens),
            "peer": lambda: peer.answer(ids, args.new_tokens),
        }
        turns = in_turns(sides, args.repeats, [os.getpid(), peer.pid], args.patience)
    figures = {name: summary(each) for name, each in turns.items()}
    ratio = {
        kind: figures["kvjax"]["median_tokens_per_s"][kind] / theirs
        for kind, theirs in figures["peer"]["median_tokens_per_s"].items()
    }
    same = agreement(*(each[0].answer.tokens for each in turns.values()))
    print(f"ratio {ratio['decode']:.2f}, end to end {ratio['end_to_end']:.2f}; greedy {same}")
    if args.out:
        record = {
            "run": {**run_record(args.commit), "python": platform.python_version()},
            "peer": peer.versions,
            "model": path.name,
            "dtype": "float32",
            "prompt_tokens": len(ids),
            "new_tokens": args.new_tokens,
            "threads": len(cores),
            "load_average_before": load_before,
            "results": figures,
            "kvjax_over_peer": ratio,
            "greedy_tokens": same,
        }
        write_json(args.out, record)


if __name__ == "__main__":
    main()
