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
