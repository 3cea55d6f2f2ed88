"""Attention matching: the tokens that stay take over the mass and the output of those that go."""

import dataclasses
import math
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.compress.context import Context
from kvjax.errors import UsageError
from kvjax.matching.bias import fit_common_weight, fit_weights
from kvjax.matching.least_squares import product
from kvjax.matching.scores import Head, each_head
from kvjax.matching.values import fit_values

RIDGE_BIAS, RIDGE_VALUES = 1e-2, 3e-3
"""Of the mode "robust": with the queries of the next tokens, the error of the output hardly depends
on either over an order of magnitude; below, few queries are worse than no fit at all."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fitted:
    """What every KV head holds after matching: the kept slots in order, then padding.

    Attributes:
        index: the slot; 0 in padding.
        valid: False in padding.
        bias: the new float32 log-mass, all of it; ``-inf`` in padding.
        v: the new float32 values, 0 in padding; None where the cache was given without values.
    """

    index: Int[Array, "B Hkv T"]
    valid: Bool[Array, "B Hkv T"]
    bias: Float[Array, "B Hkv T"]
    v: Float[Array, "B Hkv T D"] | None


@dataclasses.dataclass(frozen=True)
class AttentionMatching:
    """Fits a log-mass bias and a value for every kept token, for each KV head on its own.

    Zweiger et al., 2026 (arXiv 2602.16284). With ``E_ij = exp(q_i . k_j * scale + b_j - M_i)`` over
    the latest queries ``i`` and what each of them sees, ``M_i`` one shift for a query::

        w = argmin |sum over kept j of E_ij w_j - sum over all j of E_ij|^2      within bounds
        C = argmin |softmax(q_i . k_j * scale + b_j + log w_j) C - attention output|^2

    The new bias is ``b + log w`` (the released program forgets ``b``), and ``C`` are the new
    values. Fixed slots (the recent tail, pivotal tokens, a protected prompt) stay as they are, bit
    for bit, and stand on both sides: what the kept tokens miss of a query then counts as little or
    as much as it does in the whole attention, which is what is deployed.

    Where fewer queries than tokens are at hand (64 positions of 4 heads are 256), the released
    solvers fit them exactly and say nothing on the next query. The mode "robust" draws the weights
    towards the best common one and the values towards those that were there.

    Attributes:
        queries: latest positions whose queries are fitted, of all heads of the group.
        mode: "faithful", the released solvers (clamped least squares and two steps of projected
            gradient descent; least squares of least norm), or "robust".
        fit_bias: True; "scalar": one weight for all tokens that are not fixed; False: none.
        fit_values: False: values stay.
        bounds: lowest and highest ``w``.
        steps: of projected gradient descent, in the mode "faithful". Released with keys found by
            orthogonal matching pursuit: 0, and bounds of 1e-12 and e^7.
        total: lowest and highest new bias, of tokens that are not fixed.
        ridge_bias: pull of the weights in the mode "robust", relative to the largest eigenvalue
            of the normal equations.
        ridge_values: the same for values.
        relative: whether the missed mass of a query counts as a share of its mass. The released
            solver, False, counts it in units of the query's largest term.
        carry_bias: False: the new bias is ``log w`` alone, as released. For ablations.
        reference: which queries are fitted: the "last" ones read, or those with which the model
            would "repeat" its context, as the authors do it.
    """

    queries: int = 64
    mode: Literal["robust", "faithful"] = "robust"
    fit_bias: bool | Literal["scalar"] = True
    fit_values: bool = True
    bounds: tuple[float, float] = (math.exp(-3), math.exp(3))
    steps: int = 2
    total: tuple[float, float] = (-7.0, 10.0)
    ridge_bias: float = RIDGE_BIAS
    ridge_values: float = RIDGE_VALUES
    relative: bool = False
    carry_bias: bool = True
    reference: Literal["last", "repeat"] = "last"

    needs_mass: ClassVar[bool] = False
    needs_keys: ClassVar[bool] = True

    def __post_init__(self):
        if self.queries < 1:
            raise UsageError(f"queries must be at least 1, got {self.queries}")
        if self.steps < 0:
            raise UsageError(f"steps must be at least 0, got {self.steps}")
        if self.reference not in ("last", "repeat"):
            raise UsageError(f"reference must be 'last' or 'repeat', got {self.reference!r}")
        if self.mode not in ("robust", "faithful"):
            raise UsageError(f"mode must be 'robust' or 'faithful', got {self.mode!r}")
        if self.fit_bias not in (True, False, "scalar"):
            raise UsageError(f"fit_bias must be True, 'scalar' or False, got {self.fit_bias!r}")
        if not 0 < self.bounds[0] <= 1 <= self.bounds[1]:
            raise UsageError(f"bounds must be above 0 and hold 1 between them, got {self.bounds}")
        if not self.total[0] <= 0 <= self.total[1]:
            raise UsageError(f"total must hold 0 between its two, got {self.total}")
        for name in ("ridge_bias", "ridge_values"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} must be above 0, got {getattr(self, name)}")

    @property
    def needs_queries(self) -> int:
        return self.queries

    @property
    def needs_values(self) -> bool:
        """Whether it looks at values."""
        return self.fit_values

    def __call__(
        self,
        ctx: Context,
        keep: Bool[Array, "B Hkv S"],
        fixed: Bool[Array, "B Hkv S"],
        count: int,
        stored_k: Float[Array, "B Hkv S D"] | None = None,
    ) -> Fitted:
        """Match what is kept to all that is there.

        Args:
            ctx: the cache of one layer before anything is evicted, with keys and queries, and with
                values where they are to be fitted.
            keep: the slots that stay.
            fixed: those of them that stay as they are. Rows without a query stay as they are too.
            count: the most slots that a head keeps; more of them would be left out.
            stored_k: the kept keys as the cache will hold them, where that is not as in ``ctx``:
                quantised, say.
        """
        keep &= ctx.live
        order = jnp.argsort(~keep, axis=2, stable=True)[:, :, :count].astype(jnp.int32)
        padding = ((0, 0), (0, 0), (0, count - order.shape[2]))
        valid = jnp.pad(jnp.take_along_axis(keep, order, 2), padding)
        order = jnp.pad(order, padding)
        index = jnp.where(valid, order, 0)
        fixed = jnp.take_along_axis(fixed, index, 2)
        k = ctx.k if stored_k is None else stored_k
        k = jnp.take_along_axis(k, index[..., None], 2)
        bias, v = each_head(self._fit, ctx, self.queries, ctx.v, k, index, valid, fixed)
        return Fitted(index, valid, bias, v)

    def _fit(self, head: Head, v, k, index, valid, fixed):
        k = jnp.where(valid[:, None], k, 0).astype(jnp.float32)
        old = jnp.where(valid, head.bias[index], 0)
        all_seen = head.seen
        seen = all_seen[:, index] & valid[None]
        logits = head.logits(head.k, head.bias, all_seen)
        shift = logits.max(1, keepdims=True)
        masses = jnp.where(all_seen, jnp.exp(logits - shift), 0)
        mass = masses.sum(1)
        design = jnp.where(seen, jnp.exp(head.logits(k, old, seen) - shift), 0)
        free = valid & ~fixed & seen.any(0)

        bias = jnp.where(free, self._bias(design, mass, free, old), old)
        values = None
        if v is not None:
            v = jnp.where(head.live[:, None], v, 0).astype(jnp.float32)
            values = v[index]
            if self.fit_values:
                ridge = self.ridge_values if self.mode == "robust" else 0.0
                outputs = product(masses, v) / jnp.maximum(mass, 1e-30)[:, None]
                kept = jax.nn.softmax(head.logits(k, bias, seen), axis=1)
                kept = jnp.where(seen, kept, 0)
                values = fit_values(kept, outputs, values, free, ridge=ridge)
            values = jnp.where(valid[:, None], values, 0)
        return jnp.where(valid, bias, -jnp.inf), values

    def _bias(self, design, mass, free, old):
        if not self.fit_bias:
            return old
        common = {"bounds": self.bounds, "relative": self.relative}
        if self.fit_bias == "scalar":
            weights = fit_common_weight(design, mass, free, **common)
        else:
            ridge = self.ridge_bias if self.mode == "robust" else 0.0
            weights = fit_weights(design, mass, free, ridge=ridge, steps=self.steps, **common)
        return jnp.clip(jnp.log(weights) + (old if self.carry_bias else 0), *self.total)
