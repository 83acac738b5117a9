"""What is timed: single matrices, the candidates, and the chain of a draft step, in stock's way and in ours."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import timing
import torch
from dflash2_patches.fp8 import gemm, head, memory

# Matrices for which launches of our kernel are tried: most of the bytes, and one small one.
SWEPT = ("head", "gate_up", "down", "qkv")
QUERY, SAMPLED, TOP, EPS = 8, 7, 16, 1e-6
SHORTLIST = 32


def prepare(device: torch.device) -> None:
    """Import vLLM's parts and make its per-worker workspace."""
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    import vllm.model_executor.models.qwen3_dflash2  # noqa: F401
    from vllm.v1.worker.workspace import init_workspace_manager

    if device.type == "cuda":
        torch.cuda.set_device(0)
        init_workspace_manager(torch.device("cuda:0"))


def matrices(shape: memory.DrafterShape) -> dict[str, tuple[int, int, int]]:
    """(count, rows, columns) of every matrix of a step, the LM head included."""
    return {**shape.matrices(), "head": (1, shape.vocab, shape.hidden)}


def tokens(name: str, batch: int) -> int:
    """Rows of activations that a matrix sees."""
    return (SAMPLED if name == "head" else QUERY) * batch


def weight(n: int, k: int, options: Any) -> torch.Tensor:
    """A random matrix [n, k], normally distributed, of unit gain."""
    return torch.randn(n, k, device=options.device, dtype=options.dtype) * k**-0.5


def stock_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """VLLM's own unquantized GEMM; in a rehearsal PyTorch's, vLLM's CPU product wants a prepared layer."""
    if x.device.type == "cpu":
        return torch.nn.functional.linear(x, w)
    from vllm.model_executor.layers.utils import dispatch_unquantized_gemm

    return dispatch_unquantized_gemm()(None, x, w, None)


def launches(num_tokens: int, n: int, k: int) -> list[gemm.Tile]:
    """Launches of our kernel worth a try."""
    width = next((size for size in (16, 32, 64) if num_tokens <= size), 128)
    found = []
    for height, columns, warps, stages in (
        (64, 128, 4, 4),
        (64, 256, 4, 3),
        (64, 256, 4, 4),
        (128, 128, 4, 4),
        (128, 128, 8, 4),
        (128, 256, 8, 3),
        (256, 64, 8, 4),
        (256, 128, 8, 3),
    ):
        tiles = -(-n // height) * -(-num_tokens // width)
        shared = (height + 2 * width) * columns * stages
        if height > n or shared > 220 * 1024:
            continue
        splits = [s for s in (1, 2, 4, 8) if -(-k // columns) % s == 0 and 132 <= tiles * s <= 1100] or [1]
        found += [gemm.Tile(width, height, columns, split, warps, stages) for split in splits]
    return found


class Held:
    """Copies of one matrix in every product's layout, so many that no graph reads one from the L2."""

    def __init__(self, n: int, k: int, forms: list[str], options: Any) -> None:
        plain = weight(n, k, options)
        small = options.device.type == "cpu"
        self.plain = [plain.clone() for _ in range(2 if small else timing.copies(plain.nbytes))]
        self.packed: dict[str, list[gemm.Packed]] = {}
        for form in forms:
            first = gemm.pack(plain, form)
            count = 2 if small else timing.copies(first.nbytes)
            self.packed[form] = [
                gemm.Packed(form, first.weight.clone(), first.scale.clone(), n, k) for _ in range(count)
            ]

    def names(self) -> list[str]:
        """Stock, then the products."""
        return ["stock", *self.packed]

    def graph(self, name: str, x: torch.Tensor, launch: gemm.Tile | None = None) -> tuple[Callable[[], Any], int]:
        """What a graph does, and how many calls that is."""
        if name == "stock":
            return lambda: [stock_product(x, w) for w in self.plain], len(self.plain)
        held = self.packed[name]
        if launch is not None:
            a16 = name == "triton"
            return lambda: [gemm.rows_product(x, p.weight, p.scale, a16, launch) for p in held], len(held)
        return lambda: [gemm.multiply(p, x) for p in held], len(held)


class Heads:
    """The candidates of sampled rows: `ways` maps a name to a function of the hidden states [rows, hidden]."""

    def __init__(self, forms: list[str], options: Any, plain: torch.Tensor | None = None) -> None:
        from vllm.model_executor.layers import logits_processor
        from vllm.model_executor.layers.logits_processor import LogitsProcessor
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        self.module, shape = logits_processor, options.shape
        self.processor = LogitsProcessor.__new__(LogitsProcessor)
        torch.nn.Module.__init__(self.processor)
        self.processor.scale, self.processor.soft_cap, self.processor.head_dtype = 1.0, None, None
        method: Any = UnquantizedEmbeddingMethod()
        if options.device.type == "cpu":
            method = SimpleNamespace(apply=lambda layer, x, bias=None: stock_product(x, layer.weight))
        self.lm_head = SimpleNamespace(
            weight=weight(shape.vocab, shape.hidden, options) if plain is None else plain,
            quant_method=method,
            tp_size=1,
            shard_indices=SimpleNamespace(num_org_vocab_padding=0, org_vocab_start_index=0),
        )
        self.copies = {form: gemm.pack(self.lm_head.weight, form) for form in forms}
        self.ways: dict[str, Callable[[torch.Tensor], Any]] = {"stock": self.stock}
        for form in forms:
            self.ways[f"{form}+{SHORTLIST}"] = lambda x, f=form: self.ours(f, SHORTLIST, x)
        for form in forms:
            self.ways[f"{form}+0"] = lambda x, f=form: self.ours(f, 0, x)
        self._logits: dict[int, torch.Tensor] = {}
        self.ways["(top 16 of stock)"] = lambda x: self.module._topk(self.logits(x), TOP)
        self.ways["(list of 32)"] = lambda x: head.unsorted_topk(self.module, self.logits(x), SHORTLIST)
        self.ways["(32 scored exactly)"] = lambda x: head.exact(x, self.lm_head.weight, self.listed(x), TOP)

    def stock(self, x: torch.Tensor) -> Any:
        """VLLM's own."""
        return self.processor.get_top_k_tokens(self.lm_head, x, TOP)

    def ours(self, form: str, shortlist: int, x: torch.Tensor) -> Any:
        """As the patch computes them."""
        draft = head.Draft(self.copies[form], shortlist)
        return head.candidates(self.module, self.processor, self.lm_head, draft, x, TOP)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Logits that are there already: for the parts after the product."""
        if x.shape[0] not in self._logits:
            self._logits = {x.shape[0]: stock_product(x, self.lm_head.weight)}
        return self._logits[x.shape[0]]

    def listed(self, x: torch.Tensor) -> torch.Tensor:
        """Rows that are spread over the head."""
        vocab = self.lm_head.weight.shape[0]
        spread = torch.arange(x.shape[0] * SHORTLIST, device=x.device, dtype=torch.int32) * 7919 % vocab
        return spread.view(x.shape[0], SHORTLIST)

    def agreement(self, x: torch.Tensor) -> dict[str, float]:
        """Share of stock's candidates that are found, on these random rows."""
        stock = self.stock(x)[0]
        found = {}
        for name, way in self.ways.items():
            if "+" in name:
                ids = way(x)[0]
                same = (ids[:, :, None] == stock[:, None, :]).any(2).float().mean().item()
                found[name] = round(same, 5)
        return found


class Chain:
    """A whole step's matrices in their order, with the norms, convolutions and activation between them."""

    def __init__(self, forms: list[str], options: Any) -> None:
        from vllm import _custom_ops as ops
        from vllm.model_executor.models import qwen3_dflash2

        self.ops, self.model, self.options, self.shape = ops, qwen3_dflash2, options, options.shape
        self.forms = forms
        self.plain: dict[str, list[torch.Tensor]] = {}
        self.packed: dict[tuple[str, str], list[gemm.Packed]] = {}
        for name, (count, n, k) in options.shape.matrices().items():
            first = weight(n, k, options)
            self.plain[name] = [first.clone() for _ in range(count)]
            for form in forms:
                self.packed[form, name] = [gemm.pack(w, form) for w in self.plain[name]]
        self.heads = Heads(forms, options)
        s = options.shape
        self.norm = torch.ones(s.hidden, device=options.device, dtype=options.dtype)
        self.base = torch.randn(2, s.conv_taps, s.hidden, device=options.device, dtype=options.dtype) * 0.5

    def names(self) -> list[str]:
        """Stock and every product, for head and body."""
        return ["stock", *self.forms]

    def nbytes(self, size: int) -> float:
        """Bytes of all weights at `size` bytes a value."""
        return float(sum(size * c * n * k for c, n, k in matrices(self.shape).values()))

    def inputs(self, batch: int) -> dict[str, torch.Tensor]:
        """Random inputs of a step."""
        s, rows = self.shape, QUERY * batch

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(*size, device=self.options.device).to(self.options.dtype)

        sampled = torch.arange(rows, device=self.options.device).view(batch, QUERY)[:, 1:].flatten()
        return {"aux": draw(rows, s.target_layers * s.hidden), "x": draw(rows, s.hidden), "sampled": sampled}

    def run(self, way: str, batch: int, inputs: dict[str, torch.Tensor]) -> Any:
        """One step."""
        s, rows = self.shape, QUERY * batch

        def product(name: str, i: int, x: torch.Tensor) -> torch.Tensor:
            if way == "stock":
                return stock_product(x, self.plain[name][i])
            return gemm.multiply(self.packed[way, name][i], x)

        context = product("context", 0, self.normed(product("fc", 0, inputs["aux"])))
        context = context.view(rows, s.layers, 2, -1).permute(2, 1, 0, 3).contiguous()
        x, residual = inputs["x"].clone(), torch.zeros_like(inputs["x"])
        for layer in range(s.layers):
            self.ops.fused_add_rms_norm(x, residual, self.norm, EPS)
            x, coefficients = self.prepared(product("conv", 2 * layer, x), x)
            x = product("qkv", layer, x)
            x = product("o", layer, x[:, : s.heads * s.head_dim].contiguous())
            x = self.convolved(x, coefficients, 1)
            self.ops.fused_add_rms_norm(x, residual, self.norm, EPS)
            x, coefficients = self.prepared(product("conv", 2 * layer + 1, x), x)
            x = product("gate_up", layer, x)
            gated = torch.empty(rows, s.intermediate, device=x.device, dtype=x.dtype)
            torch.ops._C.silu_and_mul(gated, x)
            x = self.convolved(product("down", layer, gated), coefficients, 1)
        self.ops.fused_add_rms_norm(x, residual, self.norm, EPS)
        sampled = x[inputs["sampled"]]
        if way == "stock":
            return context, self.heads.stock(sampled)
        return context, self.heads.ours(way, SHORTLIST, sampled)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """RMSNorm."""
        out = torch.empty_like(x)
        self.ops.rms_norm(out, x, self.norm, EPS)
        return out

    def prepared(self, projected: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The convolution before a block, and the coefficients of the one after it."""
        groups = self.shape.hidden // self.shape.conv_group
        coefficients = projected.reshape(x.shape[0], 2, self.shape.conv_taps, groups)
        return self.convolved(x, coefficients[:, 0], 0), coefficients[:, 1]

    def convolved(self, x: torch.Tensor, delta: torch.Tensor, side: int) -> torch.Tensor:
        """VLLM's grouped convolution."""
        s = self.shape
        return self.model._grouped_conv(
            x, delta, self.base[side], QUERY, s.hidden // s.conv_group, s.conv_group, s.conv_taps
        )
