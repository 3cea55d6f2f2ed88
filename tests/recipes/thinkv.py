"""ThinKV on a small model with given tokens, looked at after every tick by an oracle."""

import collections
import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import recipes
from kvjax.cache import plan
from kvjax.cache.plan import bucket
from kvjax.codecs import KeyBasis, code_keys
from kvjax.codecs.basis import plain_keys as decoded_keys
from kvjax.compress.policy import policies
from kvjax.decoding.chunk import DecodeState
from kvjax.decoding.empty import empty_cache
from kvjax.decoding.forced import force_chunk
from kvjax.decoding.maintain import maintain
from kvjax.decoding.prefill import prefill_chunk
from kvjax.recipes import Recipe
from kvjax.thoughts import Given, Retention
from pallas_kernels import SCRATCH_PAGE
from pallas_kernels.read import plain_keys, plain_values
from tests.thoughts import kept
from tests.thoughts.machine import Machine

EVERY, SCHEDULE, TICK, WINDOW = 32, (16, 8, 4, 2), 16, 16
PROMPTS = (20, 9, 33)
ANSWERS = (208, 208, 150)
"""Tokens that are read after each row's prompt; the last row ends early, off every border."""


def recipe(kinds: str = "RTERET", budget=56, *, covers: str = "next", paper=False, **options):
    how = {"schedule": SCHEDULE} | {
        name: options.pop(name)
        for name in [field.name for field in dataclasses.fields(Retention)]
        if name in options
    }
    return recipes.thinkv(
        budget,
        segmenter=Given(kinds, every=EVERY, covers=covers),
        retention=None if budget is None else Retention(**how),
        paper=paper,
        **{"page_size": 16} | options,
    )


def tokens(count, vocabulary: int = 95, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocabulary, n).astype(np.int32) for n in count]


def planned(lm, how: Recipe, rows: int, prompt: int, answer: int):
    return plan(
        lm.config,
        how,
        batch_size=rows,
        prompt_tokens=prompt,
        max_new_tokens=answer + 1,
        dtype=lm.dtype,
        parameter_bytes=0,
    )


class Run:
    """Rows that read given tokens; ``ticks`` goes on until they are all read.

    Attributes:
        state: of the rows, after their last tick or maintenance.
        done: steps so far.
    """

    def __init__(self, lm, how: Recipe, prompts, answers, seed: int = 0, longest: int = 0):
        self.lm, self.recipe, self.seed = lm, how, seed
        self.prompts, self.answers = prompts, answers
        rows = len(prompts)
        longest = max(longest, *map(len, prompts))
        self.plan = planned(lm, how, rows, longest, max(map(len, answers)))
        cache = empty_cache(lm, self.plan.geometry)
        padded = np.zeros((rows, bucket(longest)), np.int32)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = prompt
        count = np.array([len(prompt) for prompt in prompts], np.int32)
        logits = jnp.zeros((rows, lm.config.vocab_size), jnp.float32)
        cache, self.logits = prefill_chunk(lm.model, cache, logits, padded, count, seed, recipe=how)
        left = jnp.asarray([len(answer) for answer in answers], jnp.int32)
        zero = jnp.zeros(rows, jnp.int32)
        self.state = DecodeState(cache, zero, left, jnp.ones(rows, bool))
        self.done = 0

    def maintain(self, compress=True) -> None:
        self.state = maintain(
            self.state,
            jnp.asarray(np.broadcast_to(np.array(compress), len(self.prompts))),
            self.seed,
            config=self.lm.config,
            recipe=self.recipe,
            done=self.done,
        )

    def next_tokens(self) -> np.ndarray:
        found = np.zeros((self.recipe.tick, len(self.answers)), np.int32)
        for row, answer in enumerate(self.answers):
            part = answer[self.done : self.done + self.recipe.tick]
            found[: len(part), row] = part
        return found

    def step(self) -> np.ndarray:
        """Read a tick of tokens; returns the logits after each."""
        self.state, logits, _, _ = force_chunk(
            self.lm.model,
            self.state,
            jnp.asarray(self.next_tokens()),
            width=None,
            recipe=self.recipe,
        )
        self.done += self.recipe.tick
        return np.asarray(logits)

    @property
    def steps(self) -> int:
        return max(map(len, self.answers))


@dataclasses.dataclass
class Layer:
    """One layer's slots, as numpy arrays [B, Hkv, pages, slots, ...] for each class."""

    table: list[np.ndarray]
    pos: list[np.ndarray]
    bias: list[np.ndarray]
    k: list[np.ndarray]
    v: list[np.ndarray]
    raw: list[list[np.ndarray]]


@jax.jit
def _read(cache):
    found = []
    for layer in cache.layers:
        parts = []
        for pool, table in zip(layer.pools, layer.tables, strict=True):
            group = [
                jnp.repeat(x[table], pool.page_size // x.shape[1], 3)
                for x in (pool.k, pool.k_scale, pool.k_zero)
                if x is not None
            ]
            group += [
                jnp.repeat(x.swapaxes(1, 2)[table], pool.page_size // x.shape[2], 3)
                for x in (pool.v, pool.v_scale, pool.v_zero)
                if x is not None
            ]
            parts.append(
                {
                    "table": table,
                    "pos": pool.pos[table],
                    "bias": pool.bias[table],
                    "k": plain_keys(pool, table, jnp.float32),
                    "v": plain_values(pool, table, jnp.float32),
                    "raw": group,
                }
            )
        found.append(parts)
    return found


def read(cache) -> list[Layer]:
    found = jax.tree.map(np.array, _read(cache))
    names = [field.name for field in dataclasses.fields(Layer)]
    return [Layer(**{name: [part[name] for part in parts] for name in names}) for parts in found]


@functools.partial(jax.jit, static_argnames=("config",))
def dense_logits(model, token, position, keys, values, seen, *, config):
    """Logits of one step over exactly the tokens that are ``seen``, and its own.

    Args:
        keys: for each layer [B, Hkv, S, D]; ``values`` likewise.
        seen: for each layer bool [B, Hkv, S].
    """

    def attend(index, layer, q, k, v, sinks):
        k, v = (
            jnp.concatenate([old[index], new.swapaxes(1, 2)], 2)
            for old, new in ((keys, k), (values, v))
        )
        mask = jnp.pad(seen[index], ((0, 0), (0, 0), (0, 1)), constant_values=True)
        grouped = q[:, 0].reshape(len(q), k.shape[1], -1, q.shape[3])
        dots = jnp.einsum("bhgd,bhsd->bhgs", grouped, k, precision="highest") * config.scale
        dots = jnp.where(mask[:, :, None], dots, -jnp.inf)
        if sinks is not None:
            sink = sinks.reshape(1, k.shape[1], -1, 1).astype(jnp.float32)
            dots = jnp.concatenate([dots, jnp.broadcast_to(sink, (*dots.shape[:3], 1))], 3)
            v = jnp.pad(v, ((0, 0), (0, 0), (0, 1), (0, 0)))
        out = jnp.einsum("bhgs,bhsd->bhgd", jax.nn.softmax(dots, -1), v, precision="highest")
        return out.reshape(q.shape), layer

    hidden, _ = model(token[:, None], position[:, None], attend, (None,) * config.num_layers)
    return model.logits(hidden[:, 0])


class Oracle:
    """What must be in the cache after every maintenance, from the paper and the recipe alone.

    Attributes:
        seen: how often what is worth seeing was seen.
    """

    def __init__(self, run: Run):
        self.run = run
        how, config = run.recipe, run.lm.config
        self.policies = policies(how, config)
        retention = how.retention
        self.schedule = SCHEDULE if retention is None else retention.schedule
        switches = (
            {}
            if retention is None
            else {name: getattr(retention, name) for name in ("at", "repeated", "itself")}
        )
        self.machines = [
            Machine(EVERY, self.schedule, covers=how.segmenter.covers, **switches)
            for _ in run.prompts
        ]
        self.group = math.lcm(*(c.group for p in self.policies for c in p.classes))
        self.left = [0] * len(run.prompts)  # positions below have left the recent window
        self.came = [0] * len(run.prompts)  # before the last maintenance
        self.closed = [0] * len(run.prompts)
        self.bytes: dict[tuple, bytes] = {}
        self.keys: dict[tuple, np.ndarray] = {}
        self.made: dict[tuple, np.ndarray] = {}
        self.owners: dict[int, dict[tuple, tuple]] = {}
        self.places: dict[int, dict[tuple, tuple]] = {}
        self.used: dict[tuple, tuple] = {}
        self.now: set[tuple] = set()
        self.gone: set[tuple] = set()
        self.seen = collections.Counter()

    def note_recent(self) -> None:
        """Keys as the model made them, before they are coded."""
        for index, layer in enumerate(self.run.state.cache.layers):
            pool, table = layer.pools[0], np.asarray(layer.tables[0])
            pos, keys = np.asarray(pool.pos)[table], np.asarray(pool.k)[table]
            for row, head, i, slot in np.argwhere(pos >= 0):
                at = row, head, i, slot
                self.made[index, int(row), int(head), int(pos[at])] = keys[at]

    # The schedule.

    def budget(self, answered: int) -> int:
        budget = self.run.recipe.budget
        return budget if isinstance(budget, int) else max(1, math.ceil(budget * answered))

    def work(self, evicts: bool = True) -> None:
        """One maintenance of every row."""
        done, how = self.run.done, self.run.recipe
        self.came = list(self.left)
        for row, machine in enumerate(self.machines):
            if done >= len(self.run.answers[row]):
                continue  # it is finished, and stays as it is
            if done % EVERY == 0:
                number = done // EVERY
                late = how.segmenter.covers == "past"
                kinds = how.segmenter.kinds
                kind = kinds[(number - late) % len(kinds)]
                machine.border(number, kind, evicts=evicts and how.retention is not None)
            if not done:
                continue
            prompt = len(self.run.prompts[row])
            below = max(prompt + done - how.window, 0)
            together = EVERY if how.segmenter.covers == "past" else self.group
            out = max(below - prompt, 0) // together * together
            self.left[row] = max(self.left[row], min(below, prompt) + out)
            self.closed[row] = max(self.left[row] - prompt, 0) // EVERY
            if evicts and how.retention is not None:
                machine.fit(self.closed[row], self.budget(done))

    # The cache.

    def check(self) -> list[Layer]:
        """All that must hold after a maintenance; returns what was read of the cache."""
        cache = self.run.state.cache
        layers = read(cache)
        lengths = [
            len(prompt) + min(self.run.done, len(answer))
            for prompt, answer in zip(self.run.prompts, self.run.answers, strict=True)
        ]
        assert np.asarray(cache.length).tolist() == lengths, "logical positions"
        assert not np.asarray(cache.crowded).any(), "a token found no slot"
        assert cache.nbytes() == self.run.plan.geometry.nbytes
        self._check_thoughts(cache.thoughts)
        self._check_pages(cache)
        live = {}
        for index, layer in enumerate(layers):
            self._take(index, layer, live)
        for index in range(len(layers)):
            for row in range(len(self.machines)):
                for head in range(self.run.lm.config.num_kv_heads):
                    self._check_held(index, row, head, live.get((index, row, head), {}))
        now = {(*at, p) for at, held in live.items() for p in held}
        assert not now & self.gone, "an evicted token came back"
        self.gone |= self.now - now
        self.now = now
        return layers

    def _check_thoughts(self, thoughts) -> None:
        for row, machine in enumerate(self.machines):
            kinds, levels = (np.asarray(x)[row] for x in (thoughts.kind, thoughts.level))
            known = len(machine.kinds)
            assert "".join("RET"[k] for k in kinds[:known]) == "".join(machine.kinds)
            assert (kinds[known:] == -1).all()
            assert levels[:known].tolist() == machine.levels and not levels[known:].any()
            assert np.asarray(thoughts.demoted)[row].tolist() == [
                machine.by_transition,
                machine.by_budget,
            ]
            self.seen["transition"] += machine.by_transition
            self.seen["budget"] += machine.by_budget

    def _check_pages(self, cache) -> None:
        for layer in cache.layers:
            for pool, table, free in zip(layer.pools, layer.tables, layer.free, strict=True):
                table = np.asarray(table)
                unowned = np.asarray(free.pages)[: int(free.count)].tolist()
                ids = sorted(table[table != SCRATCH_PAGE].tolist() + unowned)
                assert ids == list(range(1, len(pool.k))), "pages lost, shared or both"
                assert np.isneginf(np.asarray(pool.bias)[SCRATCH_PAGE]).all()

    def _take(self, index: int, layer: Layer, live: dict) -> None:
        """Note the live tokens of a layer by row and head, with the class and page of each."""
        before, owners, places = self.owners.get(index, {}), {}, {}
        unknown = collections.defaultdict(list)
        forget = self.run.recipe.retention is None or self.run.recipe.retention.forget
        for c, pos in enumerate(layer.pos):
            for row, head, i in np.ndindex(pos.shape[:3]):
                page = int(layer.table[c][row, head, i])
                if page == SCRATCH_PAGE:
                    continue
                assert not c or (pos[row, head, i] >= 0).any(), "an empty page is owned"
                for slot, p in enumerate(pos[row, head, i].tolist()):
                    at, place = (row, head, i, slot), (c, page, slot)
                    attended = layer.bias[c][at] > -np.inf
                    if p < 0:
                        # What was there is attended until it is overwritten, if at all.
                        mine = before.get(place, (None,))[:2] == (row, head)
                        ghost = bool(c) and mine and not forget
                        if attended and not ghost and c and not forget:
                            what = b"".join(x[at].tobytes() for x in layer.raw[c])
                            unknown[row, head].append(what)
                            owners[place] = row, head, None
                            continue
                        assert attended == ghost, "evicted slots"
                        self.seen["ghost"] += ghost
                        if ghost:
                            owners[place] = before[place]
                        continue
                    assert layer.bias[c][at] == 0
                    held = live.setdefault((index, row, head), {})
                    assert p not in held, "a token is there twice"
                    held[p] = c
                    owners[place] = row, head, p
                    if c:
                        places[place] = row, head, p
                        self._check_slot(index, (row, head, p), at, place, layer)
        for place, token in places.items():
            if self.places.get(index, {}).get(place) != token:
                self._check_new(index, place)
        for (row, head), found in unknown.items():
            # Stored and evicted in one maintenance.
            came = range(self.came[row], self.left[row])
            assert len(found) <= len([p for p in came if p not in live[index, row, head]])
            others = {what for at, what in self.bytes.items() if at[:3] != (index, row, head)}
            assert not others & set(found), "another row or head is attended"
        self.owners[index], self.places[index] = owners, places

    def _check_slot(self, index: int, token: tuple, at: tuple, place: tuple, layer: Layer) -> None:
        key, c = (index, *token), place[0]
        what = b"".join(x[at].tobytes() for x in layer.raw[c])
        assert self.bytes.setdefault(key, what) == what, "a survivor changed"
        self.keys.setdefault(key, layer.k[c][at])
        self.seen["reused"] += self.used.setdefault((index, place), token) != token
        self.used[index, place] = token

    def _check_new(self, index: int, place: tuple) -> None:
        """A slot is taken with those that share its scale, once all of them are free."""
        c, page, slot = place
        group = self.policies[index].classes[c - 1].group
        for other in range(slot // group * group, slot // group * group + group):
            assert (c, page, other) not in self.places.get(index, {}), "a live slot was taken"

    def _check_held(self, index: int, row: int, head: int, held: dict[int, int]) -> None:
        policy, how = self.policies[index], self.run.recipe
        prompt, length = len(self.run.prompts[row]), int(self.run.state.cache.length[row])
        left, machine = self.left[row], self.machines[row]
        if policy.keeps == "window":
            width = self.run.lm.config.windows[index]
            assert set(range(max(length - width + 1, 0), length)) <= held.keys()
            return
        if self.run.done:
            recent = set(range(left, length))
            assert {p for p, c in held.items() if not c} == recent, "the recent window"
        self._check_prompt(index, {p: c for p, c in held.items() if p < prompt}, row)
        if not self.run.done:
            return
        total = 0
        for number in range(self.closed[row]):
            start = prompt + number * EVERY
            mine = {p: c for p, c in held.items() if start <= p < start + EVERY}
            size = machine.size(number) if policy.keeps == "budget" else EVERY
            assert len(mine) == size, f"tokens of segment {number}"
            total += size
            if mine:
                self._check_class(policy, mine, machine.kinds[number])
        growing = prompt + self.closed[row] * EVERY
        mine = {p: c for p, c in held.items() if growing <= p < left}
        assert mine.keys() == set(range(growing, left)), "the growing segment"
        if mine:
            self._check_class(policy, mine, machine.kinds[self.closed[row]])
        if policy.keeps == "budget" and how.retention is not None:
            floor = min(self.schedule[-1], EVERY) * self.closed[row]
            assert total <= max(self.budget(length - prompt), floor), "the budget"

    def _check_class(self, policy, held: dict[int, int], kind: str) -> None:
        codecs = {policy.classes[c - 1].name for c in held.values()}
        wanted = self.codec(policy, self.run.recipe.thought_codecs["RET".index(kind)])
        assert codecs == {wanted}, "a token is not in the class of its thought"

    def codec(self, policy, name: str) -> str:
        """Layer 0 of a model with a key bias is kept in 8 bits."""
        index = self.policies.index(policy)
        return "int8" if index == 0 and self.run.lm.config.qkv_bias else name

    def _check_prompt(self, index: int, held: dict[int, int], row: int) -> None:
        policy, how = self.policies[index], self.run.recipe
        prompt = len(self.run.prompts[row])
        if how.selector is None or policy.keeps == "all":
            assert held.keys() == set(range(prompt)), "the prompt"
        else:
            assert len(held) <= max(how.prompt_budget, how.floor), "the prompt's budget"
            assert len(held) >= min(how.prompt_budget, prompt), "and no less"
        stored = {policy.classes[c - 1].name for c in held.values() if c}
        if stored:
            assert stored == {self.codec(policy, how.prompt_codec)}

    # What is computed.

    def expected_logits(self, layers: list[Layer]) -> np.ndarray:
        """Of the next step, by dense attention over what is attended now."""
        how, config = self.run.recipe, self.run.lm.config
        position = np.asarray(self.run.state.cache.length)
        keys, values, seen = [], [], []
        for index, layer in enumerate(layers):
            flat = [x.reshape(*x.shape[:2], -1) for x in layer.pos]
            near = [p >= 0 for p in flat]
            if how.retention is not None and not how.retention.forget:
                ghosts = self.owners[index]
                for c, table in enumerate(layer.table):
                    for row, head, i in np.ndindex(table.shape):
                        page, size = int(table[row, head, i]), layer.pos[c].shape[3]
                        for slot in range(size):
                            if c and page and (c, page, slot) in ghosts:
                                near[c][row, head, i * size + slot] = True
            window = config.windows[index]
            if window is not None:
                near = [
                    n & (position[:, None, None] - p < window)
                    for n, p in zip(near, flat, strict=True)
                ]
            seen.append(np.concatenate(near, 2))
            for found, parts in ((keys, layer.k), (values, layer.v)):
                found.append(
                    np.concatenate([x.reshape(*x.shape[:2], -1, x.shape[4]) for x in parts], 2)
                )
        # A free slot may hold anything: what is not seen must not spread.
        for index, mask in enumerate(seen):
            for part in (keys, values):
                part[index] = np.where(mask[..., None], part[index], 0)
        token = self.run.next_tokens()[0]
        return np.asarray(
            dense_logits(
                self.run.lm.model,
                jnp.asarray(token),
                jnp.asarray(position),
                *([jnp.asarray(x) for x in part] for part in (keys, values, seen)),
                config=config,
            )
        )

    def check_kmeans(self) -> int:
        """Tokens of closed segments are those that K-means leaves; returns how many were clear."""
        clear, retention = 0, self.run.recipe.retention
        gone = self.made.keys() - self.now
        heads = range(self.run.lm.config.num_kv_heads)
        for index, policy in enumerate(self.policies):
            if policy.keeps != "budget":
                continue
            for row, machine in enumerate(self.machines):
                for number in range(self.closed[row]):
                    start = len(self.run.prompts[row]) + number * EVERY
                    mine = range(start, start + EVERY)
                    keys = self._stored_keys(index, machine.kinds[number], row, mine)
                    for head in heads:
                        own = np.concatenate(keys, 1) if retention.shared else keys[head]
                        survived, margin = kept.kmeans_levels(own, self.schedule)
                        if margin < 2e-4:
                            continue
                        clear += 1
                        wanted = {
                            p
                            for p, s in zip(mine, survived, strict=True)
                            if s >= machine.levels[number]
                        }
                        found = {p for p in mine if (index, row, head, p) not in gone}
                        assert found == wanted, "tokens that K-means leaves"
        return clear

    def _stored_keys(self, index: int, kind: str, row: int, mine) -> np.ndarray:
        """Keys [Hkv, T, D] of a segment as they are stored; what went at once is coded here."""
        policy, layer = self.policies[index], self.run.state.cache.layers[index]
        codec = policy.classes[policy.of_kind["RET".index(kind)] - 1]
        heads = range(self.run.lm.config.num_kv_heads)
        made = np.array([[self.made[index, row, h, p] for p in mine] for h in heads])
        pool = layer.pools[1]
        basis = KeyBasis(pool.mean, pool.balance)
        coded = codec.k.decode(codec.k.encode(code_keys(codec, basis, jnp.asarray(made)[None])))
        keys = np.array(decoded_keys(codec, basis, coded)[0])
        for h, (t, p) in itertools.product(heads, enumerate(mine)):
            if (index, row, h, p) in self.keys:
                # A scale may be rounded to the next float16 where the program is another one.
                stored = self.keys[index, row, h, p]
                np.testing.assert_allclose(keys[h, t], stored, rtol=2.0**-10, atol=1e-5)
                keys[h, t] = stored
        return keys


def follow(lm: kvjax.LanguageModel, how: Recipe, *, every_tick: bool = True, **size) -> Oracle:
    """Run all the way, checking everything after every tick."""
    vocabulary = lm.config.vocab_size - 1
    prompts = tokens(size.pop("prompts", PROMPTS), vocabulary)
    answers = tokens(size.pop("answers", ANSWERS), vocabulary, seed=1)
    run = Run(lm, how, prompts, answers)
    oracle = Oracle(run)
    while run.done < run.steps:
        oracle.note_recent()
        run.maintain()
        oracle.work()
        layers = oracle.check()
        active = [run.done < len(answer) for answer in answers]
        wanted = oracle.expected_logits(layers) if every_tick else None
        found = run.step()[0]
        if wanted is not None:
            apart = np.abs(found - wanted)[active].max() / np.abs(wanted[active]).max()
            assert apart < 2e-5, f"attention of step {run.done}: {apart}"
    return oracle
