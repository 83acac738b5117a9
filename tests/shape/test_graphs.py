"""Capture sizes, against the progress bars of vLLM's log."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflash_serve.shape.graphs import GraphCount, capture_sizes, exact_count, graph_count


def test_counts_of_the_measured_runs() -> None:
    """Log: 35 piecewise, 16 full and 16 draft graphs with k = 7 and 16 sequences; 7 and 5 without a drafter."""
    assert graph_count(16, 7, 8192) == exact_count(16, 7, 8192) == GraphCount(35, 16, 16)
    assert graph_count(16, 0, 8192) == exact_count(16, 0, 8192) == GraphCount(7, 5, 0)


def test_sizes_are_those_of_the_default_grid() -> None:
    assert capture_sizes(4, 0, 8192) == (1, 2, 4, 8)
    assert capture_sizes(256, 0, 8192)[-3:] == (480, 496, 512)
    assert capture_sizes(4, 7, 16)[-1] == 16


def test_a_schedule_has_graphs_for_each_width() -> None:
    assert graph_count(16, 7, 8192, widths=(7, 3, 0)).full > graph_count(16, 7, 8192).full


@given(st.integers(1, 300), st.integers(0, 60), st.sampled_from([0, 3, 7]), st.sampled_from([512, 2048, 8192]))
def test_more_sequences_never_mean_less_memory(n: int, more: int, k: int, batched: int) -> None:
    assert graph_count(n + more, k, batched).total >= graph_count(n, k, batched).total
