"""What is wrong with a server, read from its metrics: findings in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from dflash_serve.findings import Finding, note, refuse, warn
from dflash_serve.observe.metrics import Engine, MetricsError, Server, Snapshot
from dflash_serve.observe.names import table

# Fewer drafts than these prove nothing about a mean; with so many, none accepted is no accident.
MIN_DRAFTS, MIN_INERT_DRAFTS = 200, 50
MIN_PREFIX_TOKENS = 10_000
# Share of the shortest contexts' acceptance length below which longer ones count as fallen.
CONTEXT_FALL, MIN_CONTEXT_DRAFTS = 0.7, 30
POOL_TOLERANCE = 0.03
REGRESSION = 0.05


@dataclass(frozen=True)
class Expected:
    """Bands to hold a server against; None where there is none."""

    acceptance_min: float | None = None
    acceptance_max: float | None = None
    tok_s_min: float | None = None
    kv_pool_tokens: float | None = None
    max_model_len: float | None = None
    drafter: bool | None = None

    @classmethod
    def exported(cls, server: Server) -> Expected:
        """What the server itself exports: the bands of the plan that it was started from."""
        values = server.values
        drafter = values.get("expected_drafter_active")
        return cls(
            values.get("expected_acceptance_length_min"),
            values.get("expected_acceptance_length_max"),
            values.get("expected_output_tok_s_min"),
            values.get("expected_kv_pool_tokens"),
            values.get("expected_max_model_len"),
            None if drafter is None else drafter > 0,
        )

    def under(self, other: Expected) -> Expected:
        """`other`, with this one's values where it has none."""
        given = {key: value for key, value in vars(other).items() if value is not None}
        return replace(self, **given)


@dataclass(frozen=True)
class Reading:
    """What is judged.

    Attributes:
        now: the latest scrape: counters since the server's start.
        recent: counters since the scrape before, None with one scrape.
        seconds: time between the two.
        expected: bands that the caller gives; the server's own fill the rest.
    """

    now: Snapshot
    recent: Snapshot | None = None
    seconds: float | None = None
    expected: Expected = Expected()

    @property
    def counted(self) -> Snapshot:
        """The counters to judge: the interval's, else those since the start."""
        return self.recent or self.now

    def bands(self, engine: Engine) -> Expected:
        """Bands of an engine."""
        return Expected.exported(self.now.servers.get(engine.server, Server({}))).under(self.expected)


def check(reading: Reading) -> list[Finding]:
    """All findings, the gravest first; an empty list when nothing is wrong.

    Raises:
        MetricsError: the text lacks what every vLLM exports, so nothing can be said.
    """
    require_whole(reading.now)
    found = [finding for look in LOOKS for finding in look(reading)]
    return sorted(found, key=lambda finding: ["refuse", "warn", "note"].index(finding.severity.value))


def require_whole(snapshot: Snapshot) -> None:
    """Refuse a text that was cut off at the end of a line, or that isn't vLLM's.

    Raises:
        MetricsError: a figure is missing that every vLLM from 0.20 exports, for at least one engine.
    """
    if not snapshot.engines:
        raise MetricsError("no figure of vLLM is in this text", fix="give the server's /metrics, not another page")
    for engine in snapshot.engines:
        for key, name in table().metrics.items():
            present = key in engine.values or key in engine.split or key in engine.histograms
            if name.every and not present and not any(stem in engine.unusable for stem in name.names):
                raise MetricsError(
                    f"the text lacks {name.names[0]} of {engine.label}, which every vLLM from 0.20 exports",
                    fix="it is cut off, or a proxy drops series: scrape the server itself, again",
                )


def _numbers(reading: Reading) -> Iterator[Finding]:
    for engine in reading.now.engines:
        if engine.unusable:
            yield warn(
                "metrics-unusable",
                f"no numbers in {', '.join(sorted(engine.unusable))}: NaN, negative, or buckets that don't add up",
                where=engine.label,
                fix="figures that need them are left out; scrape again, then look at the server's log",
            )
        usage = engine.values.get("kv_cache_usage")
        if usage is not None and usage > 1.001:
            yield warn("usage-above-one", f"KV cache usage is {usage:.2f}: it was summed on the way, a fraction is at "
                       "most 1", where=engine.label, fix="aggregate with avg or max, never with sum")  # fmt: skip
    gone = sorted(reading.now.names & set(table().removed))
    if gone:
        yield note("metrics-of-old", f"{', '.join(gone)}: this vLLM is older than 0.20", fix="docs/metrics.md#names")
    if reading.recent is not None and reading.recent.restarted:
        where = ", ".join(" ".join(part for part in identity if part) for identity in reading.recent.restarted)
        yield note("restarted", "the server restarted between the two readings: counted since its start", where=where)


def _drafter(reading: Reading) -> Iterator[Finding]:
    for engine in reading.counted.engines:
        bands = reading.bands(engine)
        if bands.drafter is False:
            continue
        drafts, accepted = engine.values.get("drafts"), engine.values.get("accepted_tokens")
        if drafts is None and not any("spec_decode_num_drafts" in stem for stem in engine.unusable):
            yield refuse("drafter-not-active", "the drafter is not active: the server exports no speculative decoding",
                         where=engine.label, fix="compare --speculative-config in the server's log")  # fmt: skip
        elif drafts is not None and accepted is None and not engine.unusable:
            raise MetricsError(f"the text has drafts of {engine.label} but no accepted tokens", fix="scrape it again")
        elif drafts == 0 and engine.values.get("generation_tokens", 0) >= MIN_DRAFTS:
            tokens = engine.values["generation_tokens"]
            yield refuse("drafter-idle", f"{tokens:.0f} tokens were generated and nothing was drafted",
                         where=engine.label, fix="restart: the drafter is loaded and ignored")  # fmt: skip
        elif drafts is not None and accepted == 0 and drafts >= MIN_INERT_DRAFTS:
            yield _inert(reading, engine, drafts)


def _inert(reading: Reading, engine: Engine, drafts: float) -> Finding:
    server = reading.counted.servers.get(engine.server, Server({}))
    tokens = engine.values.get("draft_tokens")
    what = f"the drafter is inert: {drafts:.0f} drafts" + (f" of {tokens:.0f} tokens" if tokens else "")
    if server.values.get("nan_drafts"):
        why = "its scores are NaN: serve in bfloat16 (a float16 target does that to it), and check its weights"
    else:
        why = "a float16 target, another target's drafter, or corrupted weights: dflash-serve fetch --verify"
    return refuse("drafter-inert", f"{what}, none accepted", where=engine.label, fix=why)


def _acceptance(reading: Reading) -> Iterator[Finding]:
    for engine in reading.counted.engines:
        length, bands = engine.acceptance_length, reading.bands(engine)
        drafts, accepted = engine.values.get("drafts", 0.0), engine.values.get("accepted_tokens", 0.0)
        if length is None or not accepted:
            continue
        if drafts < MIN_DRAFTS:
            yield note("few-drafts", f"only {drafts:.0f} drafts so far: acceptance length {length:.2f} says little yet",
                       where=engine.label)  # fmt: skip
        elif bands.acceptance_min is not None and length < bands.acceptance_min:
            yield warn(
                "acceptance-below-band",
                f"acceptance length {length:.2f} over {drafts:.0f} drafts, the band starts at {bands.acceptance_min:g}",
                where=engine.label,
                fix="other text than the recipe's, a causal drafter, or weights that changed under their name",
            )
        elif bands.acceptance_max is not None and length > bands.acceptance_max:
            yield note("acceptance-above-band", f"acceptance length {length:.2f} is above the band's "
                       f"{bands.acceptance_max:g}: text that repeats itself", where=engine.label)  # fmt: skip
        positions = engine.positions
        if any(later > earlier for earlier, later in pairwise(positions)):
            yield warn("positions", "a later draft position is accepted more often than an earlier one, which can't be",
                       where=engine.label, fix="a proxy mixes servers, or vLLM counts wrongly: report it")  # fmt: skip


def _context(reading: Reading) -> Iterator[Finding]:
    for server in reading.counted.servers.values():
        rows = [(end, 1 + a / d) for end, (d, a) in sorted(server.by_context.items()) if d >= MIN_CONTEXT_DRAFTS]
        if len(rows) >= 2 and rows[-1][1] - 1 < CONTEXT_FALL * (rows[0][1] - 1):
            told = ", ".join(f"{length:.2f} up to {end:,.0f}" for end, length in rows)
            yield warn("acceptance-falls-with-context", f"acceptance length falls with the context: {told} tokens",
                       fix="restart without prefix caching to see whether restored prefixes do it "
                       "(vllm#47930)")  # fmt: skip


def _nan(reading: Reading) -> Iterator[Finding]:
    for server in reading.counted.servers.values():
        if bad := server.values.get("nan_drafts"):
            drafts = server.values.get("watched_drafts", 0)
            yield refuse("nan-drafts", f"{bad:.0f} of {drafts:.0f} watched drafts have NaN scores, so none of their "
                         "tokens is accepted", fix="serve in bfloat16, and check the drafter's weights")  # fmt: skip


def _memory(reading: Reading) -> Iterator[Finding]:
    for name, server in reading.now.servers.items():
        values = server.values
        bands = Expected.exported(server).under(reading.expected)
        pool, window = values.get("kv_pool_tokens"), values.get("max_model_len")
        if pool and bands.kv_pool_tokens and pool < bands.kv_pool_tokens * (1 - POOL_TOLERANCE):
            yield warn("kv-pool-small", f"the KV pool holds {pool:,.0f} tokens, planned were "
                       f"{bands.kv_pool_tokens:,.0f}", where=name,
                       fix="something else holds memory of this GPU: dflash-serve fit --explain")  # fmt: skip
        if window and bands.max_model_len and window < bands.max_model_len:
            yield refuse("window-lowered", f"the server takes {window:,.0f} tokens, planned were "
                         f"{bands.max_model_len:,.0f}", where=name, fix="its log says who lowered it")  # fmt: skip
        if values.get("topk_fallback"):
            yield warn("topk-fallback", "FlashInfer's top-k failed its trial: drafting uses the slower torch.topk",
                       where=name, fix="prebuild the kernel in the image: dflash-serve build")  # fmt: skip
        refused = [patch for patch, outcome in server.patches.items() if outcome == "refused"]
        if refused:
            yield refuse("patch-refused", f"patches do not fit this vLLM: {', '.join(sorted(refused))}",
                         where=name, fix="dflash-serve patches")  # fmt: skip


def _prefix_cache(reading: Reading) -> Iterator[Finding]:
    for engine in reading.counted.engines:
        queries, hits = engine.values.get("prefix_cache_queries"), engine.values.get("prefix_cache_hits")
        if queries is not None and hits == 0 and queries >= MIN_PREFIX_TOKENS:
            yield warn("prefix-cache-dead", f"0 reuse: {queries:,.0f} prompt tokens were looked up in the prefix "
                       "cache, none was found", where=engine.label, fix="send one long prompt twice; still 0 means "
                       "that block sizes prevent hits: docs/runbook.md#prefix-cache-dead")  # fmt: skip


def _load(reading: Reading) -> Iterator[Finding]:
    for engine in reading.counted.engines:
        values = engine.values
        preempted, finished = values.get("preemptions"), values.get("requests_finished")
        if preempted and finished is not None and preempted > 10 and preempted > 0.1 * finished:
            yield warn("preemption-storm", f"{preempted:.0f} preemptions for {finished:.0f} finished requests: prompts "
                       "are computed again and again", where=engine.label,
                       fix="fewer sequences (max_num_seqs), or a larger pool")  # fmt: skip
        if reading.recent is None:
            continue
        running, tokens, steps = (
            values.get("running", 0),
            values.get("generation_tokens"),
            engine.histograms.get("steps"),
        )
        span = f"in {reading.seconds:.0f} s" if reading.seconds else "since the earlier reading"
        # vLLM counts a step once it yields something, so a prefill alone shows in the cache's usage only.
        usage_moved = "kv_cache_usage" not in engine.unmoved
        if running > 0 and tokens == 0 and steps and not steps.count and not usage_moved:
            yield refuse("engine-wedged", f"{running:.0f} requests run, and no step was made {span}",
                         where=engine.label, fix="restart it; keep its log")  # fmt: skip
        floor = reading.bands(engine).tok_s_min
        if floor and reading.seconds and running > 0 and tokens and _decodes(engine):
            speed = tokens / reading.seconds
            if speed < floor:
                yield warn("output-below-band", f"{speed:.1f} tokens/s with {running:.0f} running, one stream alone "
                           f"makes {floor:g}", where=engine.label, fix="dflash-serve top: acceptance, preemptions, "
                           "the GPU's power")  # fmt: skip


def _decodes(engine: Engine) -> bool:
    """Whether nothing says that it rather prefills. Both times are told when a request ends; slow ones end late."""
    decode, prefill = engine.histograms.get("decode_time"), engine.histograms.get("prefill_time")
    return decode is None or prefill is None or decode.sum >= prefill.sum


LOOKS: tuple[Callable[[Reading], Iterator[Finding]], ...] = (
    _numbers, _drafter, _nan, _acceptance, _context, _memory, _prefix_cache, _load,
)  # fmt: skip


def regression(now: Snapshot, baseline: Snapshot) -> list[Finding]:
    """Acceptance length against another server's or version's, on the same prompts.

    Returns:
        One finding when it is more than 5 % lower, none else.

    Raises:
        MetricsError: one of the two drafted too little to compare.
    """
    for snapshot, which in ((now, "this reading"), (baseline, "the baseline")):
        require_whole(snapshot)
        if snapshot.drafts < MIN_DRAFTS or snapshot.acceptance_length is None:
            raise MetricsError(f"{which} has {snapshot.drafts:.0f} drafts, {MIN_DRAFTS} are needed to compare")
    new, old = now.acceptance_length or 1.0, baseline.acceptance_length or 1.0
    if new >= old * (1 - REGRESSION):
        return []
    return [
        warn(
            "acceptance-regression",
            f"acceptance length {new:.2f} against {old:.2f} of the baseline: {100 * (1 - new / old):.1f} % lower",
            fix="same prompts and sampling? Then keep the old version: dflash-serve environment, or its image",
        )
    ]
