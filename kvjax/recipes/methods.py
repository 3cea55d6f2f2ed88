"""Named methods."""

import os

from kvjax.codecs import kv_codec
from kvjax.compress import Selector
from kvjax.compress.selectors import (
    H2O,
    RKV,
    TOVA,
    HighestAttention,
    Random,
    SegmentQuotas,
    SnapKV,
    Streaming,
)
from kvjax.dynakv.projector import BLOCKS, Projector
from kvjax.errors import UsageError
from kvjax.matching import AttentionMatching
from kvjax.recipes.recipe import Recipe
from kvjax.thoughts import Given, Retention, Segmenter
from kvjax.thoughts.calibration import Calibration, by_sparsity

DECODING_BUDGET = 1024
"""Tokens a KV head of the recipes that evict, unless one is given."""
LATENT_PAGE = 16
"""Slots of a page of latents: the more blocks, the more pages are not full."""


def full(page_size: int = 64) -> Recipe:
    """Keep every token, in the model's own dtype: what every other recipe is compared with."""
    return Recipe("full", page_size, codec=None)


def uniform(codec: str = "int4", **options) -> Recipe:
    """Keep every token in one codec."""
    return Recipe("uniform", codec=codec, **options)


def dynakv(
    adapter: str | os.PathLike,
    tau: float | None = None,
    *,
    rate: float | None = None,
    blocks: int = BLOCKS,
    selector: Selector | None = None,
    **options,
) -> Recipe:
    """DynaKV: latents of keys and values, each token at a rank of its own (arXiv 2603.04411).

    Args:
        adapter: folder that ``python -m kvjax.train_dynakv`` wrote.
        tau: a component is kept if its mask is above this; None: as the adapter was trained.
        rate: share of all blocks that room is made for. None: 1.25 times what was measured after
            training, and everything with a smaller ``tau``. Where a row needs more, blocks that
            find no room are left out, none of a token's first.
        blocks: latents are cut into so many blocks, and ranks rounded up to whole ones.
        selector: what evicts tokens beyond a budget (1,024 tokens if not told otherwise), in all
            heads the same ones: ``SnapKV()``, once after the prompt if ``every`` is not given.
        **options: other fields of ``Recipe``; ``codec`` is the latents'.

    Raises:
        UsageError: the adapter cannot be read or decoded with, or options that cannot work.
    """
    projector = Projector.load(adapter, tau=tau, rate=rate, blocks=blocks)
    own = {"page_size": LATENT_PAGE}
    if selector is not None:
        own |= {"selector": selector, "budget": DECODING_BUDGET, "every": 0}
    return Recipe("dynakv", projector=projector, **own | options)


def kivi(codec: str = "kivi2", window: int = 32, **options) -> Recipe:
    """KIVI: asymmetric groups, keys along tokens and values along channels (arXiv 2402.02750).

    Keys and values both leave the recent window a group at a time; KIVI's own values leave it one
    by one, which differs for the few tokens between.

    Args:
        codec: "kivi4", "kivi2", "kivi2-g64" and the like, or a width: "4" or "2".
        window: the last tokens that are kept as they were made.
        **options: fields of ``Recipe``.

    Raises:
        UsageError: any other codec.
    """
    codec = _kivi_codec(codec)
    group = kv_codec(codec).group
    return Recipe("kivi", codec=codec, window=window, tick=options.pop("tick", group), **options)


def streaming(**options) -> Recipe:
    """StreamingLLM: the first tokens and the last ones (arXiv 2309.17453)."""
    return _evicting("streaming", Streaming(), **options)


def random(**options) -> Recipe:
    """Evict uniformly at random: the control that every other selector has to beat."""
    return _evicting("random", Random(), **options)


def h2o(**options) -> Recipe:
    """H2O: tokens that have received the most attention (arXiv 2306.14048)."""
    return _evicting("h2o", H2O(), **options)


def tova(**options) -> Recipe:
    """TOVA: tokens that the last query attends to most (arXiv 2401.06104)."""
    return _evicting("tova", TOVA(), **options)


def snapkv(**options) -> Recipe:
    """SnapKV: select the prompt once, by what its last queries attend to (arXiv 2404.14469)."""
    return _evicting("snapkv", SnapKV(), **{"every": 0} | options)


def snapkv_decode(**options) -> Recipe:
    """SnapKV's scores, also while decoding."""
    return _evicting("snapkv_decode", SnapKV(), **{"every": 128} | options)


def rkv(**options) -> Recipe:
    """R-KV: importance minus redundancy, every 128 steps (arXiv 2505.24133)."""
    return _evicting("rkv", RKV(), **{"every": 128} | options)


def thinkv(
    budget: int | float | None = DECODING_BUDGET,
    calibration: Calibration | None = None,
    *,
    segmenter: Segmenter | None = None,
    thought_codecs: tuple[str, str, str] | None = None,
    retention: Retention | None = None,
    paper: bool = False,
    **options,
) -> Recipe:
    """ThinKV: precision and eviction by the kind of thought (arXiv 2510.01290).

    Args:
        budget: tokens of the answer's complete segments a KV head; None evicts nothing.
        calibration: of the model, which tells thoughts apart. Without one, or with one that found
            no layer that does, all thoughts are of one kind (the paper's fallback for models that
            do not reason, appendix E.10): 4 bits throughout, evict at the budget alone.
        segmenter: what tells thoughts apart instead.
        thought_codecs: for reasoning, execution and transition; 4, 4 and 2 bits if None, and 4 bits
            throughout where thoughts are not told apart.
        retention: what stays of a segment; the paper's schedule if None.
        paper: the paper's own choices where ours differ: NVFP4 and ternary codes in groups, which
            keep their slots until the whole group has gone, the prompt as it was made, thresholds
            as they were calibrated, and one set of tokens for all heads.
        **options: other fields of ``Recipe``. With a ``projector`` latents are kept, in one codec,
            and one set of tokens for all heads.

    Raises:
        UsageError: a calibration and a segmenter, or options that cannot work.
    """
    if calibration is not None and segmenter is not None:
        raise UsageError("calibration and segmenter exclude each other: give one of them")
    if calibration is not None and calibration.thresholds is not None:
        segmenter = by_sparsity(Given("R"), calibration, corrected=not paper)
    few = ("nvfp4", "nvfp4", "ternary") if paper else ("int4", "int4", "int2")
    segmenter = segmenter or Given("R")
    one_kind = isinstance(segmenter, Given) and set(segmenter.kinds) == {"R"}
    codecs = few[:1] * 3 if one_kind else few
    given = {"codec": "int4", "prompt_codec": "bf16" if paper else "int8"} | options
    if options.get("projector") is not None:  # one codec, and one set of tokens for all heads
        codecs = None
        given = {"codec": "int4", "page_size": LATENT_PAGE} | options
    return Recipe(
        "thinkv",
        thought_codecs=thought_codecs or codecs,
        segmenter=segmenter,
        retention=None if budget is None else retention or Retention(shared=paper),
        budget=budget,
        **given,
    )


def am(**options) -> Recipe:
    """Attention matching: the keys attended to most, fitted to all (arXiv 2602.16284).

    Both by the queries of the model repeating its context, which takes a pass over it.
    """
    asked = AttentionMatching(reference="repeat", queries=512)
    own = {"selector": HighestAttention(window=512), "compactor": asked}
    return _matching("am", **own | options)


def pam(**options) -> Recipe:
    """Attention matching by the last queries, without segments and pivotal tokens."""
    return _matching("pam", **options)


def tam(*, paper: bool = False, **options) -> Recipe:
    """Thought-aware attention matching: quotas for paragraphs (arXiv 2608.12331).

    Args:
        paper: the paper's own choices where ours differ: the released solver, nothing protected but
            the last 20 tokens, a budget that is a share of the longest row.
        **options: fields of ``Recipe``.
    """
    own = {"selector": SegmentQuotas()}
    if paper:
        own |= {"compactor": AttentionMatching(mode="faithful"), "sinks": 0, "recent": 20}
        own |= {"budget": 0.1, "share_of": "longest"}
    return _matching("tam", **own | options)


METHODS = {
    recipe.__name__: recipe
    for recipe in (
        full,
        uniform,
        kivi,
        dynakv,
        streaming,
        random,
        h2o,
        tova,
        snapkv,
        snapkv_decode,
        rkv,
        thinkv,
        am,
        pam,
        tam,
    )
}
"""Recipes by the name that ``--method`` takes."""
ADAPTED = ("dynakv",)
"""Those that need an adapter of the model; the others can be made of nothing."""


def _matching(name: str, **options) -> Recipe:
    own = {"selector": HighestAttention(), "compactor": AttentionMatching(), "every": 1024}
    return Recipe(name, **{"budget": DECODING_BUDGET} | own | options)


def _evicting(name: str, selector: Selector, **options) -> Recipe:
    return Recipe(name, selector=selector, **{"budget": DECODING_BUDGET} | options)


def _kivi_codec(codec: str) -> str:
    name = kv_codec(codec).name
    name = {"int2": "kivi2", "int4": "kivi4"}.get(name, name)
    if not name.startswith("kivi"):
        raise UsageError(
            f"codec {codec} is not KIVI's: method kivi takes 2, 4, kivi2, kivi4, and kivi2-g64 and "
            "the like; method uniform takes all"
        )
    return name
