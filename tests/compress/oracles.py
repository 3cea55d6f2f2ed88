"""Every selector's formula in float64, one head of one row at a time, over lists of tokens."""

import numpy as np

from tests.compress import layer


def softmax(logits: list[float]) -> list[float]:
    weights = [np.exp(logit - max(logits)) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def pooled(values: list[float], kernel: int, reduce) -> list[float]:
    half = kernel // 2
    padded = [0.0] * half + values + [0.0] * half
    return [reduce(padded[i : i + kernel]) for i in range(len(values))]


def logits_of(query, tokens, scale) -> list[float]:
    return [float(query @ token.key) * scale + token.bias for token in tokens]


def streaming(ctx, row, head, _) -> list[float]:
    return [token.pos for token in layer.tokens_of(ctx, row, head)]


def h2o(ctx, row, head, _) -> list[float]:
    return [token.mass for token in layer.tokens_of(ctx, row, head)]


def random(ctx, row, head, _) -> list[float]:
    def mix(x):
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
        return x ^ (x >> 16)

    draws = []
    for token in layer.tokens_of(ctx, row, head):
        state = 0
        for number in (int(ctx.seed), ctx.layer, int(ctx.length[row]), head, token.pos):
            state = mix(state ^ mix((number + 0x9E3779B9) % 2**32))
        draws.append((state // 256) / 2**24)
    return draws


def votes(ctx, row, head, count) -> list[float]:
    """Attention of the last ``count`` queries: mean over the group, sum over the queries."""
    tokens = layer.tokens_of(ctx, row, head)
    queries = layer.queries_of(ctx, row, head)
    total = [0.0] * len(tokens)
    for pos in sorted(queries)[-count:]:
        seen = [token for token in tokens if token.pos <= pos]
        for query in queries[pos]:
            if seen:
                for j, weight in enumerate(softmax(logits_of(query, seen, ctx.scale))):
                    total[j] += weight / len(queries[pos])
    return total


def tova(ctx, row, head, selector) -> list[float]:
    if not layer.queries_of(ctx, row, head):
        return streaming(ctx, row, head, selector)
    return votes(ctx, row, head, 1)


def snapkv(ctx, row, head, selector) -> list[float]:
    if not layer.queries_of(ctx, row, head):
        return streaming(ctx, row, head, selector)
    tokens = layer.tokens_of(ctx, row, head)
    first = int(ctx.length[row]) - selector.window
    before = [token for token in tokens if token.pos < first]
    total = votes(ctx, row, head, selector.window)[: len(before)]
    reduce = np.mean if selector.pooling == "average" else np.max
    scores = pooled(total, selector.kernel, reduce)
    return scores + [np.inf] * (len(tokens) - len(before))


def rkv(ctx, row, head, selector) -> list[float]:
    queries = layer.queries_of(ctx, row, head)
    if not queries:
        return streaming(ctx, row, head, selector)
    tokens = layer.tokens_of(ctx, row, head)
    first = int(ctx.length[row]) - selector.window
    before = [token for token in tokens if token.pos < first]
    importance = [0.0] * len(before)
    last = sorted(queries)[-selector.window :]
    for pos in last:
        heads = [logits_of(query, before, ctx.scale) for query in queries[pos]]
        best = [max(logits) for logits in zip(*heads, strict=True)]
        for j, weight in enumerate(softmax(best)):
            importance[j] += weight / len(last)
    importance = pooled(importance, selector.kernel, max)

    n = len(tokens)
    units = [token.key / (np.linalg.norm(token.key) + 1e-8) for token in tokens]
    total = [0.0] * n
    for i in range(n):
        line = [float(units[i] @ units[j]) if i != j else 0.0 for j in range(n)]
        repeats = [j for j in range(n) if j != i and line[j] > selector.threshold]
        if repeats:
            line[repeats[-1]] = 0.0
        elif selector.shield_first:
            line[0] = 0.0
        total = [a + b for a, b in zip(total, line, strict=True)]
    redundancy = softmax([value / n for value in total]) if n else []
    mix = selector.mix_lambda
    scores = [mix * i - (1 - mix) * r for i, r in zip(importance, redundancy, strict=False)]
    return scores + [np.inf] * (n - len(before))


def pooled_attention(ctx, row, head, count) -> list[list[float]]:
    """Of every query of a group that sees one: attention over the tokens that may go.

    In the order of ``layer.tokens_of``, 0 for those that stay anyway.
    """
    tokens = layer.tokens_of(ctx, row, head)
    queries = layer.queries_of(ctx, row, head)
    lines = []
    for pos in sorted(queries)[-count:]:
        seen = [i for i, token in enumerate(tokens) if token.pos <= pos and not token.must]
        for query in queries[pos] if seen else []:
            line = [0.0] * len(tokens)
            for i, weight in zip(
                seen, softmax(logits_of(query, [tokens[i] for i in seen], ctx.scale)), strict=True
            ):
                line[i] = weight
            lines.append(line)
    return lines


def reduced(lines, kind, count) -> np.ndarray:
    if not lines:
        return np.zeros(count)
    if kind == "max":
        return np.max(lines, 0)
    return np.mean(lines, 0) if kind == "mean" else np.mean(np.square(lines), 0) ** 0.5


def highest_attention(ctx, row, head, selector) -> list[float]:
    if not layer.queries_of(ctx, row, head):
        return streaming(ctx, row, head, selector)
    lines = pooled_attention(ctx, row, head, selector.window)
    scores = list(reduced(lines, selector.score, len(layer.tokens_of(ctx, row, head))))
    return pooled(scores, selector.kernel, np.mean) if selector.kernel > 1 else scores


def quotas(shares, available, total) -> list[int]:
    """Shares with limits of 1 and of what there is, and then whole numbers."""
    count = len(shares)
    total = min(total, sum(available))
    shares = [share / max(max(shares), 1e-30) for share in shares]
    shares = [
        max(share, 1e-6) if most else 0 for share, most in zip(shares, available, strict=True)
    ]
    first = sorted(range(count), key=lambda i: -shares[i])[:total]
    least = [int(i in first and available[i] > 0) for i in range(count)]

    def at(factor):
        return [
            min(max(factor * share, low), high)
            for share, low, high in zip(shares, least, available, strict=True)
        ]

    low, high = 0.0, 1e12
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(at(middle)) <= total else (low, middle)
    exact = at(high)
    whole = [int(x + 1e-7) for x in exact]
    open_ = [i for i in range(count) if whole[i] < available[i]]
    for i in sorted(open_, key=lambda i: -round(exact[i] - whole[i], 7))[: total - sum(whole)]:
        whole[i] += 1
    return whole


def jumps(attention, least) -> list[int]:
    """Segment numbers: one ends where attention changes by more than twice the median change."""
    if not attention:
        return []
    steps = np.abs(np.diff(attention))
    sizes = [1]
    for step in steps:
        if step > 2 * np.median(steps) and sizes[-1]:
            sizes.append(0)
        sizes[-1] += 1
    merged = [sizes[0]]
    for size in sizes[1:]:
        if size < least or merged[0] < least:
            merged[-1] += size
        else:
            merged.append(size)
    return [number for number, size in enumerate(merged) for _ in range(size)]


def segment_quotas(ctx, row, head, selector):
    """Slots that are pivotal, and slots that are chosen beside them; and all scores."""
    tokens = layer.tokens_of(ctx, row, head)
    lines = pooled_attention(ctx, row, head, selector.window)
    mean, scores = (reduced(lines, kind, len(tokens)) for kind in ("mean", selector.score))
    mine = [i for i, token in enumerate(tokens) if not token.must]
    budget = min(max(int(ctx.room[row]) - len(tokens) + len(mine), 0), len(mine))
    above = [i for i in mine if mean[i] * len(mine) >= selector.pivotal]
    above.sort(key=lambda i: (-mean[i], -tokens[i].pos))
    pivotal = above[: int(np.floor(selector.cap * budget))]
    rest = [i for i in mine if i not in pivotal]
    rest.sort(key=lambda i: (-scores[i], -tokens[i].pos))
    left = budget - len(pivotal)
    if selector.quota == "none":
        chosen = rest[:left]
    else:
        chosen, shares, available = [], [], []
        segment = [token.segment for token in tokens]
        if selector.by == "attention":
            segment = dict(zip(mine, jumps([mean[i] for i in mine], selector.least), strict=True))
        names = sorted({segment[i] for i in mine})
        for name in names:
            counted = rest if selector.exclude_pivotal else mine
            inside = [i for i in counted if segment[i] == name]
            weight, size = sum(mean[i] for i in inside), len(inside)
            if selector.weight == "token":
                weight /= max(size, 1)
            shares.append(
                {"sqrt": (weight * size) ** 0.5, "linear": weight**0.5 * size, "size": size}[
                    selector.quota
                ]
            )
            available.append(sum(segment[i] == name for i in rest))
        for name, quota in zip(
            names, quotas(shares, available, left) if names else [], strict=True
        ):
            chosen += [i for i in rest if segment[i] == name][:quota]
    return pivotal, chosen, scores


def tam(ctx, row, head, selector) -> list[float]:
    if not layer.queries_of(ctx, row, head):
        return streaming(ctx, row, head, selector)
    pivotal, chosen, scores = segment_quotas(ctx, row, head, selector)
    return [s + 4 * (i in pivotal) + 2 * (i in chosen) for i, s in enumerate(scores)]
