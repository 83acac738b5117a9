"""Block boundaries: which states have to move between slots, and with how many tokens applied.

With prefix caching, vLLM keeps a request's running state in the block that its position falls in, and wants the
state at each boundary that it passes in the block that ends there (mamba_cache_mode `align`). Stock finds the
state of any accepted token in a slot of its own and copies. Here it has to be made: from the committed state and
the recorded tokens. The decisions are those of vLLM's kernels, which still run and move the convolution's windows:

    before a step  `preprocess_mamba_align_fused_kernel`: the position enters another block -> `before_step`
    after it       `postprocess_mamba_fused_kernel`: the accepted tokens reach a boundary   -> `after_step`

Both are once a step for all layers; `commit` then moves what they found. Most steps find nothing.
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from dflash2_patches.gdn.records import Records
from dflash2_patches.gdn.verify import Moves


@dataclass(frozen=True)
class Tables:
    """Block tables of the groups that hold GDN states, rows by request slot.

    Attributes:
        addresses: `data_ptr()` of each table [G] int64, on the device; the tables are int32 [R, width].
        stride: elements from row to row.
        width: columns.
        block: tokens a block.
    """

    addresses: Tensor
    stride: int
    width: int
    block: int


def before_step(
    moves: Moves, records: Records, tables: Tables, idx_mapping: Tensor, source: Tensor, target: Tensor, offset: Tensor
) -> None:
    """Finds the requests whose position enters another block with this step's tokens; nothing waits there then.

    Call it after vLLM's own preprocessing, before `plan_step`.

    Args:
        idx_mapping: request slot (also the record row) of each request [N] int32; -1 is skipped.
        source, target: block column before and in this step [R] int32; source -1 is a fresh request.
        offset: tokens accepted a step ago minus one, as before the counts were reset [R] int32.
    """
    requests = idx_mapping.shape[0]
    if requests:
        _before_kernel[(requests,)](
            idx_mapping,
            source,
            target,
            offset,
            records.count,
            records.side,
            moves.rows,
            moves.length,
            moves.side,
            moves.slots,
            moves.final,
            tables.addresses,
            tables.stride,
            tables.width,
            moves.slots.stride(0),
            records.rows,
            GROUPS=moves.slots.shape[0],
            num_warps=1,
        )


def after_step(
    moves: Moves,
    records: Records,
    tables: Tables,
    idx_mapping: Tensor,
    column: Tensor,
    accepted: Tensor,
    computed: Tensor,
) -> None:
    """Finds the requests whose accepted tokens reach a block boundary, and the state to be kept there.

    Call it after the counts of this step are known, before vLLM's own postprocessing, which resets some.

    Args:
        column: block column of the running state [R] int32.
        accepted: tokens of this step's query that were kept, at least 1 [R] int32.
        computed: tokens computed in total, this step's included [R].
    """
    requests = idx_mapping.shape[0]
    if requests:
        _after_kernel[(requests,)](
            idx_mapping,
            column,
            accepted,
            computed,
            records.count,
            records.side,
            moves.rows,
            moves.length,
            moves.side,
            moves.slots,
            moves.final,
            tables.addresses,
            tables.stride,
            tables.width,
            moves.slots.stride(0),
            records.rows,
            BLOCK=tables.block,
            GROUPS=moves.slots.shape[0],
            num_warps=1,
        )


@triton.jit
def _emit(
    i, row, source, target, moved, slots_ptr, final_ptr, tables_ptr, stride, width, stride_group, GROUPS: tl.constexpr
):
    """Slots of both columns in every group, or 0 where nothing moves."""
    for g in range(GROUPS):
        table = tl.load(tables_ptr + g).to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * stride
        tl.store(slots_ptr + g * stride_group + i, tl.load(table + source, mask=moved, other=0))
        tl.store(final_ptr + g * stride_group + i, tl.load(table + target, mask=moved, other=0))


@triton.jit(do_not_specialize=["stride", "width", "num_rows"])
def _before_kernel(
    idx_ptr,
    source_ptr,
    target_ptr,
    offset_ptr,
    count_ptr,
    row_side_ptr,
    rows_ptr,
    length_ptr,
    side_ptr,
    slots_ptr,
    final_ptr,
    tables_ptr,
    stride,
    width,
    stride_group,
    num_rows,
    GROUPS: tl.constexpr,
):
    i = tl.program_id(0)
    row = tl.load(idx_ptr + i)
    known = (row >= 0) & (row < num_rows)
    source = tl.load(source_ptr + row, mask=known, other=-1)
    target = tl.load(target_ptr + row, mask=known, other=-1)
    moved = known & (source >= 0) & (source < width) & (target >= 0) & (target < width) & (source != target)
    count = tl.load(count_ptr + row, mask=known, other=0)
    offset = tl.load(offset_ptr + row, mask=known, other=0)
    tl.store(rows_ptr + i, row)
    tl.store(length_ptr + i, tl.where(moved, tl.minimum(tl.maximum(offset + 1, 0), count), 0))
    tl.store(side_ptr + i, tl.load(row_side_ptr + row, mask=known, other=0) & 1)
    tl.store(count_ptr + row, 0, mask=moved)
    _emit(i, row, source, target, moved, slots_ptr, final_ptr, tables_ptr, stride, width, stride_group, GROUPS)


@triton.jit(do_not_specialize=["stride", "width", "num_rows"])
def _after_kernel(
    idx_ptr,
    column_ptr,
    accepted_ptr,
    computed_ptr,
    count_ptr,
    row_side_ptr,
    rows_ptr,
    length_ptr,
    side_ptr,
    slots_ptr,
    final_ptr,
    tables_ptr,
    stride,
    width,
    stride_group,
    num_rows,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    i = tl.program_id(0)
    row = tl.load(idx_ptr + i)
    known = (row >= 0) & (row < num_rows)
    source = tl.load(column_ptr + row, mask=known, other=-1)
    accepted = tl.load(accepted_ptr + row, mask=known, other=1)
    computed = tl.load(computed_ptr + row, mask=known, other=0).to(tl.int32)
    count = tl.load(count_ptr + row, mask=known, other=0)
    running = computed - accepted + 1  # tokens with the first one of the query
    aligned = (computed // BLOCK) * BLOCK
    target = aligned // BLOCK - 1
    reached = known & (aligned >= running) & (source >= 0) & (source < width) & (target >= 0) & (target < width)
    tl.store(rows_ptr + i, row)
    tl.store(length_ptr + i, tl.where(reached, tl.minimum(aligned - running + 1, count), 0))
    tl.store(side_ptr + i, tl.load(row_side_ptr + row, mask=known, other=0) & 1)
    # In its own block the request ends exactly at the boundary: all that was accepted is applied.
    tl.store(count_ptr + row, 0, mask=reached & (source == target))
    _emit(i, row, source, target, reached, slots_ptr, final_ptr, tables_ptr, stride, width, stride_group, GROUPS)
