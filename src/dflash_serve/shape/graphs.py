"""How many CUDA graphs vLLM captures, by its rule for capture sizes (config/vllm.py, 0.31 to 0.33)."""

from __future__ import annotations

from functools import lru_cache

from dflash_serve.values import dataclass

LARGEST = 512
LARGEST_SM100 = 1024


@dataclass(frozen=True, slots=True)
class GraphCount:
    """Graphs of each kind; `total` is what the memory estimate counts."""

    piecewise: int
    full: int
    draft: int

    @property
    def total(self) -> int:
        return self.piecewise + self.full + self.draft


def capture_sizes(
    max_num_seqs: int, draft_tokens: int, max_num_batched_tokens: int, largest: int = LARGEST
) -> tuple[int, ...]:
    """Token counts that are captured, ascending."""
    width = draft_tokens + 1
    limit = min(max_num_seqs * width * 2, largest, max_num_batched_tokens)
    sizes = {size for size in (1, 2, 4) if size <= limit}
    sizes |= set(range(8, min(limit + 1, 256), 8)) | set(range(256, limit + 1, 16))
    if max_num_batched_tokens <= limit:
        sizes.add(max_num_batched_tokens)
    if width > 1:
        sizes |= {n * width for n in _request_counts(min(max_num_seqs, largest)) if n * width <= limit}
    elif max_num_seqs <= limit:
        sizes.add(max_num_seqs)
    return tuple(sorted(sizes))


@lru_cache(maxsize=256)
def graph_count(
    max_num_seqs: int,
    draft_tokens: int,
    max_num_batched_tokens: int,
    *,
    widths: tuple[int, ...] = (),
    largest: int = LARGEST,
) -> GraphCount:
    """Graphs to keep memory for: those of `exact_count`, or of a smaller server where those are more.

    A count of sequences off vLLM's grid has sizes of its own, so 126 sequences can have a graph more than 128; an
    estimate that fell there would promise a larger pool for more sequences.
    """
    most = GraphCount(0, 0, 0)
    for n in range(1, max_num_seqs + 1):
        count = exact_count(n, draft_tokens, max_num_batched_tokens, widths=widths, largest=largest)
        if count.total >= most.total:
            most = count
    return most


@lru_cache(maxsize=4096)
def exact_count(
    max_num_seqs: int,
    draft_tokens: int,
    max_num_batched_tokens: int,
    *,
    widths: tuple[int, ...] = (),
    largest: int = LARGEST,
) -> GraphCount:
    """Graphs of one server: one piecewise graph a size, one full graph a decodable size and draft width.

    Args:
        widths: draft lengths of a schedule (each has full graphs of its own); empty for a constant k.
    """
    sizes = capture_sizes(max_num_seqs, draft_tokens, max_num_batched_tokens, largest)
    full = draft = 0
    for k in widths or (draft_tokens,):
        decodes = {-(-size // (k + 1)) for size in sizes if -(-size // (k + 1)) <= max_num_seqs}
        full += len(decodes)
        if k:
            draft += len(decodes)
    return GraphCount(len(sizes), full, draft)


def _request_counts(most: int) -> set[int]:
    counts = {n for n in (1, 2, 4) if n <= most} | {most}
    return counts | set(range(8, min(most + 1, 256), 8)) | set(range(256, most + 1, 16))
