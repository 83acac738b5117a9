"""Bytes of draft-only fp8 weights: what a fit model adds to a GPU, or takes off. Stdlib only."""

from __future__ import annotations

from dataclasses import dataclass

_FP8, _BF16, _SCALE = 1, 2, 4
_KEPT = ("conv",)  # faster in bf16 (choice.toml)


@dataclass(frozen=True)
class DrafterShape:
    """A DFlash2 drafter's matrices, from its `config.json`; `target_layers` is the length of `target_layer_ids`."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    target_layers: int
    conv_taps: int
    conv_group: int

    @classmethod
    def of(cls, config: dict[str, object]) -> DrafterShape:
        """Read a drafter's configuration (the text of its `config.json`, parsed).

        Raises:
            KeyError: it is no DFlash2 drafter's.
        """
        own: dict[str, object] = config["dflash_config"]  # type: ignore[assignment]

        def number(key: str, held: dict[str, object] = config) -> int:
            return int(held[key])  # type: ignore[call-overload]

        return cls(
            hidden=number("hidden_size"),
            intermediate=number("intermediate_size"),
            layers=number("num_hidden_layers"),
            heads=number("num_attention_heads"),
            kv_heads=number("num_key_value_heads"),
            head_dim=number("head_dim"),
            vocab=number("vocab_size"),
            target_layers=len(own["target_layer_ids"]),  # type: ignore[arg-type]
            conv_taps=number("conv_kernel_size", own),
            conv_group=number("conv_group_size", own),
        )

    def matrices(self, tensor_parallel: int = 1) -> dict[str, tuple[int, int, int]]:
        """(count, rows, columns) of every matrix of the body, by its name, on one GPU.

        `fc` and the convolutions' projections are whole on each GPU; the others are split.
        """
        tp = tensor_parallel
        kv = max(1, self.kv_heads // tp) * self.head_dim
        q = self.heads // tp * self.head_dim
        return {
            "qkv": (self.layers, q + 2 * kv, self.hidden),
            "o": (self.layers, self.hidden, q),
            "gate_up": (self.layers, 2 * self.intermediate // tp, self.hidden),
            "down": (self.layers, self.hidden, self.intermediate // tp),
            "conv": (2 * self.layers, 2 * self.conv_taps * self.hidden // self.conv_group, self.hidden),
            "fc": (1, self.hidden, self.target_layers * self.hidden),
            "context": (1, self.layers * 2 * kv, self.hidden),
        }


def head_bytes(shape: DrafterShape, tensor_parallel: int = 1) -> int:
    """Bytes that the fp8 copy of the LM head adds to one GPU; the shared bf16 head stays."""
    rows = -(-shape.vocab // tensor_parallel)
    return rows * (shape.hidden * _FP8 + _SCALE)


def body_bytes(shape: DrafterShape, tensor_parallel: int = 1) -> int:
    """Bytes that converting the drafter's body adds to one GPU: negative, bf16 weights are replaced."""
    return sum(
        count * rows * (columns * (_FP8 - _BF16) + _SCALE)
        for name, (count, rows, columns) in shape.matrices(tensor_parallel).items()
        if name not in _KEPT
    )
