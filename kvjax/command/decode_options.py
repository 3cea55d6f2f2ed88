"""The options of ``python -m kvjax.decode``."""

import argparse
import dataclasses
import pathlib
from typing import Literal

from kvjax.command.options import make_parser, option
from kvjax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """What a run does; see each option's help."""

    model: str | None = option(
        None, "model directory, GGUF file or hub id (default: the demo model)"
    )
    revision: str | None = option(None, "branch, tag or commit of a hub id")
    tokenizer: str | None = option(None, "directory or hub id of another tokenizer")
    dtype: Literal["float32", "bfloat16"] = option("float32", "of the weights and activations")
    prompt: str | None = option(
        None, "the prompt; - reads standard input", "-p", group="prompt", blank=True
    )
    prompt_file: str | None = option(None, "a text file that holds the prompt", group="prompt")
    prompts: str | None = option(
        None,
        'a file of JSON lines, each {"id": ..., "prompt": ...} or {"id": ..., "messages": [...]}; '
        "- reads standard input",
        group="prompt",
    )
    explain: str | None = option(
        None,
        "dynakv: no answer, but a picture of the rank that each token of this text is kept at in "
        "every layer; --trace draws it too",
        group="prompt",
    )
    output: str | None = option(None, "file for the answers instead of standard output", "-o")
    format: Literal["text", "json", "jsonl"] | None = option(
        None, "default: text, or jsonl with --prompts or -n; json is a list then"
    )
    system_prompt: str | None = option(
        None, "put before prompts that have no system message", blank=True
    )
    chat_template: bool = option(True, "pass prompts through the model's chat template")
    thinking: Literal["on", "off", "auto"] = option("auto", "the chat template's thinking block")
    max_new_tokens: int = option(256, "tokens to generate at most", "--max-tokens", minimum=1)
    temperature: float | None = option(
        None,
        "0 is greedy (default, also of the next three: the model's own)",
        "--temp",
        minimum=0,
        group="sampling",
    )
    top_k: int | None = option(None, "sample among the N likeliest tokens; 0: all", minimum=0)
    top_p: float | None = option(
        None, "sample among the fewest tokens of this mass", minimum=0, exclusive=True, maximum=1
    )
    min_p: float | None = option(
        None, "sample among tokens this many times as likely as the likeliest", minimum=0, maximum=1
    )
    seed: int = option(0, "of the samples", minimum=0, maximum=2**32 - 1)
    greedy: bool = option(False, "the likeliest token always", group="sampling")
    samples: int = option(1, "answers a prompt, which is read once", "-n", minimum=1)
    batch_size: int = option(8, "answers decoded together", minimum=1)
    stop: tuple[str, ...] = option(
        (), "end an answer where this text begins; may be given several times"
    )
    # Written out, since the module that has the recipes needs JAX.
    method: (
        Literal[
            "full",
            "uniform",
            "kivi",
            "dynakv",
            "streaming",
            "random",
            "h2o",
            "tova",
            "snapkv",
            "snapkv_decode",
            "rkv",
            "thinkv",
            "am",
            "pam",
            "tam",
        ]
        | None
    ) = option(None, "how the cache is kept; docs/command.md has what each does (default: full)")
    kv_bits: str | None = option(
        None,
        "codec of the tokens: 8, 4, 2, k4v2, fp8, nvfp4, ternary, kivi2, ...; by thought with "
        "thinkv: R:4,E:4,T:2",
        joined=True,
    )
    prompt_bits: str | None = option(None, "codec of the prompt's tokens, if it is another")
    kv_bits_layers: str | None = option(
        None, 'codecs of single layers, the first that fits wins: "0:8,*:4"', joined=True
    )
    kv_budget: str | None = option(
        None,
        "tokens a KV head may keep, or the share of those read if it is 1.0 or below (default: "
        "1024 where the method evicts)",
        group="budget",
        joined=True,
    )
    kv_budget_bytes: str | None = option(
        None, "what a row's cache may take, in bytes or as 64MiB", group="budget", joined=True
    )
    sink_tokens: int | None = option(
        None, "first tokens that stay (default: 4; 0 with tam --paper)", minimum=0
    )
    recent_window: int | None = option(
        None,
        "last tokens that stay, or that are not coded yet where nothing is evicted (default: 32; "
        "16 with uniform, thinkv, and dynakv without --selector; 20 with tam --paper)",
        minimum=0,
    )
    protect_prompt: bool = option(False, "all of the prompt stays")
    compress_every: int | None = option(
        None, "tokens between two evictions; 0: only while the prompt is read", minimum=0
    )
    skip_layers: str | None = option(None, "layers whose tokens all stay: 0,-1", joined=True)
    compress: str | None = option(
        None,
        "where tokens may be evicted (default: prompt,think,answer)",
        joined=True,
    )
    positions: Literal["original", "contiguous"] | None = option(
        None, "contiguous: the first tokens seem to stand right before the last (streaming only)"
    )
    compress_once: bool = option(False, "evict once, --compress-every tokens into the answer")
    share_of: Literal["read", "held", "longest"] | None = option(
        None,
        "what a --kv-budget of 1.0 or below is a share of: the tokens read, those held, or the "
        "longest that an answer and its prompt may get (default: read)",
    )
    head_shares: str | None = option(
        None,
        "JSON file with the share of the budget of every KV head, a list a layer (default: alike)",
    )
    selector: (
        Literal[
            "h2o",
            "random",
            "rkv",
            "snapkv",
            "streaming",
            "tova",
            "highest_attention",
            "omp",
            "segment_quotas",
        ]
        | None
    ) = option(None, "what chooses the tokens that stay, instead of the method's own")
    compactor: Literal["none", "matching", "faithful"] | None = option(
        None,
        "what becomes of the mass of evicted tokens: none drops it, matching fits it to those that "
        "stay, faithful does so with the released solver (default: the method's own)",
    )
    calibration: str | None = option(
        None,
        "thinkv: file of python -m kvjax.calibrate (default: the one that comes with kvjax for the "
        "model, if any; without one all thoughts are of one kind)",
    )
    thoughts: str | None = option(
        None, "thinkv: the kinds of the segments instead, letters of RET that repeat: RRET"
    )
    labels: Literal["next", "past"] | None = option(
        None, "thinkv: which segment a kind found between two is for (default: next)"
    )
    sparsity_correction: bool | None = option(
        None, "thinkv: count evicted tokens in the sparsity (default: yes)"
    )
    segment_tokens: int | None = option(
        None, "thinkv: tokens of a segment (default: 128)", minimum=16
    )
    retention: str | None = option(
        None,
        "thinkv: tokens left after each demotion of a segment (default: 64,32,16,8,4)",
        joined=True,
    )
    retain_by: Literal["kmeans", "strided", "random", "attention"] | None = option(
        None, "thinkv: what chooses them (default: kmeans)"
    )
    shared_tokens: bool | None = option(
        None, "thinkv: the same tokens in all KV heads of a layer (default: no)"
    )
    transition: Literal["start", "end"] | None = option(
        None, "thinkv: when a transition demotes what lies before it (default: start)"
    )
    attend_evicted: bool = option(
        False, "thinkv: an evicted token is attended until its slot is used again"
    )
    prompt_budget: str | None = option(
        None,
        "thinkv: tokens of the prompt that --selector keeps (default: the whole prompt)",
        joined=True,
    )
    paper: bool = option(False, "thinkv, tam: the paper's own choices, where the defaults differ")
    adapter: str | None = option(
        None, "dynakv: folder that python -m kvjax.train_dynakv wrote for the model"
    )
    tau: float | None = option(
        None,
        "dynakv: components whose mask is above this are kept (default: as the adapter was "
        "trained, 0.1 if not told otherwise)",
        minimum=0,
    )
    latent_rate: float | None = option(
        None,
        "dynakv: share of all blocks to make room for (default: 1.25 times what was measured after "
        "training)",
        minimum=0,
        exclusive=True,
        maximum=1,
    )
    latent_blocks: int | None = option(
        None, "dynakv: blocks that ranks are rounded up to (default: 8)", minimum=1
    )
    fit: str | None = option(
        None,
        "memory for weights, cache and reading prompts, as 2GiB: choose the best method that fits",
        group="memory",
        joined=True,
    )
    memory: str | None = option(
        None,
        "memory that weights, cache and reading prompts may take (default: what the device has)",
        group="memory",
        joined=True,
    )
    compare: Literal["full"] | None = option(
        None, "also decode without compression, and say how far the compressed cache is from that"
    )
    compare_text: str | None = option(
        None,
        "with --compare: a text file to compare on, as the answer, instead of what is decoded "
        "without compression",
    )
    trace: str | None = option(
        None, "PNG file for a picture of the run: live tokens by thought, and bytes, over steps"
    )
    save_cache: str | None = option(
        None, "file for the cache after the answer, to go on from with --load-cache"
    )
    load_cache: str | None = option(
        None,
        "go on from a saved cache, with the same model and method: the prompt is the next turn; "
        "without one the answer goes on",
    )
    kernel: Literal["mosaic", "triton", "xla"] | None = option(
        None, "what computes attention (default: the GPU's kernel where it can run)"
    )
    tp: int = option(1, "devices that share the model: its heads and matrices", minimum=1)
    dp: int = option(1, "groups of --tp devices, each with answers of its own", minimum=1)
    coordinator: str | None = option(
        None,
        "HOST:PORT of process 0, where several share the --prompts; auto: the environment says who "
        "takes part, as under Slurm",
    )
    num_processes: int | None = option(None, "how many processes share the prompts", minimum=1)
    process_id: int | None = option(None, "which of them this is, from 0", minimum=0)
    page_size: int | None = option(
        None, "cache slots a page, a power of two (default: 64; 16 with --adapter)", minimum=1
    )
    repetition_stop: bool = option(True, "end an answer that has fallen into a loop")
    stream: bool | None = option(None, "print text as it comes (default: on a terminal)")
    stats: bool | None = option(None, "the figures below the answer (default: on a terminal)")
    quiet: bool = option(False, "no progress line, and no figures without --stats")
    verbose: bool = option(False, "show where an error came from")

    def __post_init__(self):
        """Refuse what can be seen to be wrong before anything is read.

        Raises:
            UsageError: options that do not go together.
        """
        if self.page_size is not None and self.page_size & (self.page_size - 1):
            raise UsageError(f"--page-size must be a power of two, got {self.page_size}")
        if "" in self.stop:
            raise UsageError("--stop must not be empty")
        if self.system_prompt is not None and not self.chat_template:
            raise UsageError("--system-prompt needs the chat template: drop --no-chat-template")
        if self.explain is not None:
            given = {"output": self.output, "format": self.format, "compare": self.compare}
            if unused := next((name for name, value in given.items() if value), None):
                raise UsageError(f"--{unused} is for answers: leave it out with --explain")
        if self.compare_text and not self.compare:
            raise UsageError("--compare-text is for comparing: pass --compare full as well")
        if self.trace and pathlib.Path(self.trace).suffix != ".png":
            raise UsageError(
                f"--trace draws a PNG: give a name that ends in .png, got {self.trace}"
            )
        if self.prompts and self.trace:
            raise UsageError("--trace draws one answer: leave it out with --prompts")
        if self.prompts and self.stream:
            raise UsageError("--stream is for one prompt: leave it out with --prompts")
        for name in ("save_cache", "load_cache"):
            if getattr(self, name) is not None:
                self._check_kept("--" + name.replace("_", "-"))
        if self.samples > 1:
            for name in ("compare", "trace", "stream"):
                if getattr(self, name):
                    raise UsageError(f"--{name} is for one answer: leave it out with --samples")
            if self.greedy or self.temperature == 0:
                raise UsageError(
                    f"--samples {self.samples} of greedy decoding are all alike: give a "
                    "--temperature above 0"
                )
        _check_processes(self)
        if self.stream and self.answer_format != "text":
            raise UsageError(f"--stream prints text: leave it out with --format {self.format}")

    def _check_kept(self, flag: str) -> None:
        """Refuse what does not go with ``--save-cache`` or ``--load-cache``."""
        without = {"explain": self.explain, "prompts": self.prompts, "samples": self.samples > 1}
        if flag == "--load-cache":
            without |= {
                "compare": self.compare,
                "fit": self.fit,
                "kv_budget_bytes": self.kv_budget_bytes,
                "system_prompt": self.system_prompt,
            }
        for name, given in without.items():
            if given:
                name = name.replace("_", "-")
                raise UsageError(f"--{name} does not go with {flag}: leave one of them out")

    @property
    def answer_format(self) -> Literal["text", "json", "jsonl"]:
        """The format, with its default settled."""
        return self.format or ("jsonl" if self.several else "text")

    @property
    def several(self) -> bool:
        """Whether there can be more than one answer."""
        return bool(self.prompts) or self.samples > 1


def _check_processes(config: DecodeConfig) -> None:
    """Refuse processes that could not find each other, or have nothing to share.

    Raises:
        UsageError: with the flag that is missing.
    """
    count, own = config.num_processes, config.process_id
    if config.explain is not None and config.tp * config.dp > 1:
        raise UsageError("--tp and --dp are for answers: leave them out with --explain")
    if config.coordinator is None or config.coordinator == "auto":
        given = {"--num-processes": count, "--process-id": own}
        if unused := next((flag for flag, value in given.items() if value is not None), None):
            raise UsageError(f"{unused} needs --coordinator HOST:PORT, where process 0 listens")
    elif count is None or own is None:
        missing = "--num-processes" if count is None else "--process-id"
        raise UsageError(f"--coordinator {config.coordinator} needs {missing} as well")
    elif own >= count:
        raise UsageError(f"--process-id must be below --num-processes {count}, got {own}")
    if config.coordinator is not None and config.prompts in (None, "-"):
        raise UsageError("--coordinator shares out the prompts of a file: give --prompts FILE")


def decode_parser() -> argparse.ArgumentParser:
    """Flags of every option, and of what is done with them."""
    parser = make_parser(
        DecodeConfig,
        prog="python -m kvjax.decode",
        description="Decode answers to prompts. Answers go to standard output, all else to "
        "standard error.",
        epilog="Exit codes: 0 done, 2 usage, input or output, 3 the model cannot be loaded, 4 does "
        "not fit, 5 NaN or infinity, 6 some prompts or comparisons failed, "
        "130 interrupted.",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of options; flags win over it")
    parser.add_argument(
        "--print-config", action="store_true", help="print the options as such a file and leave"
    )
    parser.add_argument(
        "--plan", action="store_true", help="print what would be allocated, without loading weights"
    )
    return parser
