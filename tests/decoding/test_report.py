"""What a result reports, against a recount."""

import dataclasses
import inspect
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import memory
from kvjax.cache import init_cache, plan
from kvjax.decoding import report
from kvjax.decoding.clock import Clock, Lap
from kvjax.decoding.conversation import Conversation
from kvjax.decoding.requests import Options, Request
from kvjax.decoding.row import Row
from kvjax.thoughts import KINDS, Thoughts
from kvjax.thoughts.state import no_thoughts
from tests.decoding import small
from tests.decoding.small import LENGTHS, NEW, PAGE, decode, prompts

LAYERS, HEADS, DIM = 3, 2, 8
SLOT = 2 * DIM * 4 + 8


@pytest.fixture(scope="module")
def results() -> list[kvjax.Result]:
    return decode(prompts())


def test_it_is_json(results):
    for result in results:
        assert json.loads(json.dumps(result.report, allow_nan=False)) == result.report


def test_usage(results):
    for result, length in zip(results, LENGTHS, strict=True):
        assert result.report["usage"] == {"prompt": length, "generated": NEW, "think": 0}


def test_live_tokens_are_the_logical_ones(results):
    """The full cache holds every token that was read; the last one chosen was not."""
    for result, length in zip(results, LENGTHS, strict=True):
        kv = result.report["kv"]
        assert kv["method"] == "full"
        live = [length, length + 8, length + 16, length + NEW - 1]
        assert kv["live_tokens"] == {
            "min": length,
            "mean": np.mean(live),
            "max": live[-1],
            "end": live[-1],
        }
        assert kv["evictions"] == 0
        assert kv["logical_tokens"] == kv["live_tokens"]["max"]


def test_bytes(results):
    config = small.lm().config
    planned = plan(
        config,
        kvjax.recipes.full(PAGE),
        batch_size=4,
        prompt_tokens=31,
        max_new_tokens=NEW,
        dtype="float32",
        parameter_bytes=0,
    )
    allocated = sum(leaf.nbytes for leaf in jax.tree.leaves(init_cache(planned.geometry)))
    for result, length in zip(results, LENGTHS, strict=True):
        size = result.report["kv"]["bytes"]
        held = length + NEW - 1
        pages = LAYERS * HEADS * -(-held // PAGE)
        assert size["codes"] == LAYERS * HEADS * held * 2 * DIM * 4
        assert size["metadata"] == LAYERS * HEADS * held * 8
        assert size["total_live"] == pages * (PAGE * SLOT + 4)
        assert size["pool_allocated"] == allocated
        logical = result.report["kv"]["logical_tokens"]
        assert size["full_bf16"] == LAYERS * HEADS * logical * 2 * DIM * 2


def test_ratios(results):
    for result in results:
        kv = result.report["kv"]
        ratio = kv["ratio"]
        assert ratio["end"] == kv["bytes"]["total_live"] / kv["bytes"]["full_bf16"]
        # Float32 and whole pages: more than twice a bare bf16 cache.
        assert 2 < ratio["end"] < 4 and 2 < ratio["time_avg"] < 6
        assert ratio["peak"] >= ratio["end"]


def test_settings_and_timing(results):
    run = decode(prompts(), seed=7, temperature=0.5, top_k=3)[0].report["run"]
    wanted = {
        "max_new_tokens": NEW,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 1.0,
        "seed": 7,
        "batch_size": 4,
        "dtype": "float32",
        "model": small.lm().source,
        "model_revision": None,
        "model_fingerprint": small.lm().fingerprint,
        "jax": jax.__version__,
    }
    assert {name: run[name] for name in wanted} == wanted
    assert run["parameter_bytes"] == sum(x.nbytes for x in jax.tree.leaves(small.lm().model))
    timing = results[0].report["timing"]
    assert timing["ttft_s"] >= timing["prefill_s"] >= 0
    assert timing["decode_tok_s"] > 0 and timing["decode_s"] > 0
    assert timing["ms_per_token"]["p99"] >= timing["ms_per_token"]["p50"] > 0
    assert results[0].report["memory"]["peak_bytes"] > 10**7


def test_a_record_is_enough_to_decode_again():
    """Whoever has the model, the prompt and the record gets the same tokens."""
    lm, recipe = small.lm(), kvjax.recipes.random(budget=40, codec="int4", page_size=16)
    [prompt] = small.prompts([60])
    options = {"seed": 11, "recipe": recipe, "max_new_tokens": 40, "stop_ids": (95,)}
    [first] = kvjax.generate(lm, [prompt], **options, **small.SAMPLED)
    run = json.loads(json.dumps(first.report["run"]))
    kept = run["recipe"]
    selector = kept.pop("selector")
    chosen = kvjax.recipes.SELECTORS[selector.pop("name").lower()](**selector)
    fields = {name: tuple(v) if isinstance(v, list) else v for name, v in kept.items()}
    again = kvjax.recipes.Recipe(**fields, selector=chosen)
    assert again == recipe
    settings = inspect.signature(kvjax.stream).parameters.keys() & run.keys() - {"recipe"}
    [second] = kvjax.generate(lm, [prompt], recipe=again, **{n: run[n] for n in settings})
    assert second.tokens == first.tokens
    [other] = kvjax.generate(lm, [prompt], **options | {"seed": 12}, **small.SAMPLED)
    assert other.tokens != first.tokens


def thoughts_of(kinds: str, demoted) -> Thoughts:
    """One row's, as a log has them."""
    [kind], none = [[KINDS.index(x) for x in kinds]], no_thoughts(1, 8)
    known = none.kind.at[0, : len(kinds)].set(jnp.asarray(kind, jnp.int32))
    told = dataclasses.replace(none, kind=known, demoted=jnp.asarray([demoted], jnp.int32))
    return jax.tree.map(lambda leaf: np.asarray(leaf)[0], told)


def rates(seen: list[Thoughts], new: int, read: int = 0, past: Thoughts | None = None) -> dict:
    """What is reported of a row that got ``new`` tokens behind a prompt of 20.

    Args:
        read: tokens behind the prompt that it had before, the last of which it reads itself.
    """
    lm, recipe = small.lm(), kvjax.recipes.thinkv()
    ids = (7,) * (20 + read)
    if past is not None:
        names = ("kind", "demoted")
        packed = {f"thoughts.{name}": getattr(past, name) for name in names}
        packed |= {"length": np.array(len(ids) - 1), "prompt": np.array(20)}
        past = Conversation(ids, read, recipe, lm.fingerprint, lm.source, str(lm.dtype), packed)
    signature = inspect.signature(kvjax.stream).parameters
    given = {field.name: signature[field.name].default for field in dataclasses.fields(Options)}
    given |= {"recipe": recipe, "stop_ids": (), "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    row = Row(lm, Request(0, ids, new, False, past=past), Options(**given))
    row.push([5] * new)
    return report._thoughts(seen, row)["thoughts"]


def test_work_on_thoughts_is_this_run_s():
    """What a conversation came with is none of it."""
    first, second = thoughts_of("R", (0, 0)), thoughts_of("RE", (2, 1))
    third = thoughts_of("RET", (3, 1))
    fresh = rates([first, second, second], 150)
    assert fresh["demotions"] == {"transition": 2, "budget": 1}
    assert (fresh["refresh_rate"], fresh["eviction_rate"]) == (2 / 149, 1 / 149)
    on = rates([second], 3, 150, past=second)
    assert (on["kinds"], on["R"], on["E"]) == ("RE", 1, 1)
    assert on["demotions"] == {"transition": 0, "budget": 0}
    assert on["refresh_rate"] == on["eviction_rate"] == 0
    # The first chunk may work on it, too; the token chosen last before is read now.
    for seen in ([third], [second, third]):
        on = rates(seen, 120, 150, past=second)
        assert on["demotions"] == {"transition": 1, "budget": 0}
        assert on["refresh_rate"] == on["eviction_rate"] == 1 / 120


def test_slots_reused_are_those_of_tokens_that_were_stored():
    """A prompt is selected from before it is stored: what goes then has had no slot."""
    config, recipe = small.lm().config, kvjax.recipes.streaming(budget=64, page_size=PAGE)
    size = {"prompt_tokens": 200, "max_new_tokens": 64, "parameter_bytes": 0}
    planned = plan(config, recipe, batch_size=1, dtype="float32", **size)
    log = report.BytesLog(planned.geometry)

    def reused(length: int, recent: int, stored: int) -> int:
        slots = np.tile(np.array([recent, stored]) * HEADS, (1, LAYERS, 1))
        log.add(0, length=np.array([length]), slots=slots, pages=slots, crowded=np.zeros(1, int))
        return log.as_dict()["slots_reused"]

    assert reused(200, 16, 48) == 0
    assert reused(216, 32, 48) == 0  # nothing has left the recent window yet
    assert reused(232, 32, 56) == 8 * LAYERS * HEADS  # 16 were stored, and 8 of them beside 48
    assert reused(248, 32, 48) == 24 * LAYERS * HEADS


def test_progress_adds_the_rows_up():
    events = kvjax.stream(
        small.lm(),
        prompts(),
        recipe=kvjax.recipes.full(PAGE),
        max_new_tokens=NEW,
        batch_size=4,
        chunk=small.CHUNK,
    )
    last = [event.progress for event in events if event.kind == "text"][-1]
    held = [length + NEW - 1 for length in LENGTHS]
    assert (last.generated, last.limit) == (4 * NEW, 4 * NEW)
    assert last.live_tokens == last.logical_tokens == sum(held)
    pages = LAYERS * HEADS * sum(-(-n // PAGE) for n in held)
    assert last.kv_bytes == pages * (PAGE * SLOT + 4)
    assert last.full_bytes == LAYERS * HEADS * sum(held) * 2 * DIM * 2
    assert last.tokens_per_s > 0


def test_progress_is_asked_once_a_chunk(monkeypatch):
    """It goes through all rows, so that asking for each of them takes their number squared."""
    asked, ask = [], report.BytesLog.live_tokens.fget
    counting = property(lambda log: asked.append(log) or ask(log))
    monkeypatch.setattr(report.BytesLog, "live_tokens", counting)
    kvjax.generate(
        small.lm(),
        [[1, 2, 3]] * 8,
        recipe=kvjax.recipes.full(PAGE),
        max_new_tokens=NEW,
        batch_size=8,
        chunk=small.CHUNK,
    )
    reads = 1 + -(-(NEW - 1) // small.CHUNK)  # the prompts' first tokens come by themselves
    assert 8 * reads < len(asked) <= 8 * (2 * reads + 4)  # a row's report asks as well


def test_a_clock_tells_compilation_apart(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def wait(seconds, compiling=0.0):
        now[0] += seconds
        if compiling:
            jax.monitoring.record_event_duration_secs(
                "/jax/core/compile/backend_compile_duration", compiling
            )
            jax.monitoring.record_event_duration_secs("/something/else", 50.0)

    with Clock() as clock:
        wait(4, compiling=1.5)
        lap = Lap(clock)
        wait(5, compiling=3.0)
        lap.mark(4)
        wait(2)
        lap.mark(32)
        wait(3, compiling=1.0)
        lap.mark(32)
    wait(10, compiling=7.0)
    times = lap.as_dict()
    assert times["wait_s"] == 4
    assert (times["ttft_s"], times["prefill_s"], times["prefill_compile_s"]) == (5, 2, 3)
    assert (times["compile_s"], times["decode_s"], times["decode_tok_s"]) == (4, 4, 16)
    assert times["ms_per_token"]["p50"] == pytest.approx(62.5)


def test_a_clock_that_saw_prefill_alone():
    with Clock() as clock:
        lap = Lap(clock)
        lap.mark(2)
    times = lap.as_dict()
    assert (times["decode_s"], times["decode_tok_s"]) == (0, 0)
    assert times["ms_per_token"] == {"p50": None, "p99": None}


def test_memory_of_this_machine():
    total = memory.device_memory()
    used = memory.memory_in_use()
    assert total > 10**8
    assert 10**7 < used["peak_bytes"] < total


@pytest.mark.parametrize(
    ("groups", "files", "limits"),
    [
        ("0::/\n", {"memory.max": "1000"}, [1000]),
        ("0::/\n", {"memory.max": "max"}, []),
        (
            "0::/a/b\n",
            {"a/b/memory.max": "max", "a/memory.max": "700", "memory.max": "9"},
            [700, 9],
        ),
        ("0::/not/mounted/here\n", {"memory.max": "1000"}, [1000]),
        ("3:cpu:/a\n2:cpu,memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "5"}, [5]),
        ("4:memory:/docker/x\n", {"memory/memory.limit_in_bytes": "5\n"}, [5]),
        ("1:name=systemd:/a:b\n", {"memory.max": "1000"}, []),
        (None, {"memory.max": "1000"}, []),
    ],
)
def test_memory_that_the_control_group_allows(tmp_path, groups, files, limits):
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert memory.control_group_limits(tmp_path) == limits


def test_the_smallest_limit_is_what_there_is(monkeypatch):
    machine = memory.device_memory()
    monkeypatch.setattr(memory, "control_group_limits", lambda: [machine // 2, 2**62])
    assert memory.device_memory() == machine // 2
