"""A DFlash2 drafter's linear layers and its context K/V projection in fp8, made after loading."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dflash2_patches.fp8 import choice, gemm

# `layers.*` and `fc` read most bytes; the candidate selector's projection (rank 256) is left as it is.
_ROOTS = ("layers.", "fc")


@dataclass
class Converted:
    """What a conversion did.

    Attributes:
        matrices: how many, by form.
        kept: why a matrix stayed as it was, by module name.
        failed: the product whose trial failed and why; nothing is converted then.
        before, after: bytes of the converted matrices.
    """

    matrices: dict[str, int] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    failed: str = ""
    before: int = 0
    after: int = 0

    def add(self, packed: gemm.Packed, before: int) -> None:
        """Count a matrix."""
        self.matrices[packed.form] = self.matrices.get(packed.form, 0) + 1
        self.before += before
        self.after += packed.nbytes

    def __str__(self) -> str:
        if self.failed:
            return f"its own weights: the product {self.failed}"
        done = ", ".join(f"{count} by {form}" for form, count in sorted(self.matrices.items())) or "none"
        text = f"{sum(self.matrices.values())} matrices in fp8 ({done}), {self.before / 2**20:.0f} MiB are now "
        text += f"{self.after / 2**20:.0f} MiB"
        if self.kept:
            name, why = next(iter(self.kept.items()))
            text += f"; {len(self.kept)} stay as they are ({name}: {why})"
        return text


def convert(model: Any, linear_base: type, method_base: type, plain: type) -> Converted:
    """Convert a loaded drafter model in place.

    Args:
        model: a `DFlashQwen3Model`.
        linear_base: vLLM's `LinearBase`.
        method_base: vLLM's `LinearMethodBase`, the base of the method that the layers get.
        plain: vLLM's `UnquantizedLinearMethod`.
    """
    done = Converted()
    if not hasattr(model, "_num_attn_layers"):
        # Dummy weights: no loader ran this. It reads the layers' plain weights, so it comes before they are replaced.
        model._build_fused_kv_buffers()
    method, layers = fp8_method(method_base), _layers(model, linear_base)
    weights: list[Any] = [getattr(layer, "weight", None) for _, layer in layers]
    for form, weight in {_form(weight): weight for weight in weights if _form(weight)}.items():
        if why := gemm.trial(form, weight.dtype, weight.device):
            done.failed = f"{form} doesn't work here ({why})"
            return done
    for name, layer in layers:
        packed = _packed(name, layer, plain)
        if isinstance(packed, str):
            done.kept[name] = packed
            continue
        done.add(packed, layer.weight.nbytes)
        _replace(layer, packed)
        layer.quant_method = method(packed)
    _context(model, done)
    return done


def _packed(name: str, layer: Any, plain: type) -> gemm.Packed | str:
    """The layer's matrix in fp8, or why not. A product that is asked for is used for every matrix."""
    if choice.stays(name) and not gemm.asked():
        return "faster in its own dtype"
    if type(layer.quant_method) is not plain:
        return f"quantized already ({type(layer.quant_method).__name__})"
    return _pack(getattr(layer, "weight", None))


def _layers(model: Any, linear_base: type) -> list[tuple[str, Any]]:
    """The linear layers that are converted, with their names."""
    return [(n, m) for n, m in model.named_modules() if isinstance(m, linear_base) and n.startswith(_ROOTS)]


def _form(weight: Any) -> str | None:
    """The product for a weight; None where it can't be converted."""
    import torch

    if weight is None or weight.ndim != 2 or weight.dtype not in (torch.bfloat16, torch.float16):
        return None
    return gemm.choose(capability(weight.device), *weight.shape)


def _pack(weight: Any) -> gemm.Packed | str:
    form = _form(weight)
    if form is None:
        shape = "its weight" if weight is None else f"{str(weight.dtype).removeprefix('torch.')} {tuple(weight.shape)}"
        return f"no fp8 product for {shape} on this device"
    return gemm.pack(weight.data, form)


def capability(device: Any) -> tuple[int, int] | None:
    """CUDA compute capability of a tensor's device, None elsewhere."""
    import torch

    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _replace(layer: Any, packed: gemm.Packed) -> None:
    """The layer's parameters are the packed ones: the plain weight is freed."""
    import torch

    del layer.weight
    layer.register_parameter("weight", torch.nn.Parameter(packed.weight, requires_grad=False))
    layer.register_parameter("weight_scale", torch.nn.Parameter(packed.scale, requires_grad=False))


def fp8_method(method_base: type) -> type:
    """A linear method that multiplies with the layer's packed parameters."""

    class DraftFp8Method(method_base):
        """Row-wise fp8 made online from a drafter's plain weights."""

        def __init__(self, packed: gemm.Packed) -> None:
            self.product = gemm.FORMS[packed.form].product
            self.form, self.rows, self.columns = packed.form, packed.rows, packed.columns

        def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
            raise NotImplementedError("the weights are made from loaded ones")

        def apply(self, layer: Any, x: Any, bias: Any | None = None) -> Any:
            flat = x.reshape(-1, self.columns)
            out = self.product(flat, layer.weight, layer.weight_scale, self.rows, self.columns)
            out = out.view(*x.shape[:-1], self.rows)
            return out if bias is None else out + bias

    return DraftFp8Method


def _context(model: Any, done: Converted) -> None:
    """The fused K/V rows of all layers, where the drafter was plain."""
    weight = getattr(model, "_fused_kv_weight", None)
    if weight is None:
        done.kept["context"] = "each layer's own quantized projection is used"
        return
    packed = _pack(weight)
    if isinstance(packed, str):
        done.kept["context"] = packed
        return
    done.add(packed, weight.nbytes)
    # vLLM asks whether this is None before anything else; nothing but `project_context` reads it from here on.
    model._fused_kv_weight = packed.weight
    model._dflash2_context = packed


def project_context(model: Any, ops: Any, context_states: Any, shape: tuple[int, int, int, int]) -> tuple[Any, Any]:
    """`DFlashQwen3Model._project_context_kv` with the fp8 rows: (K, V), each [layers, tokens, heads, head size].

    Args:
        model: a converted drafter model.
        ops: `vllm._custom_ops`.
        context_states: [tokens, hidden].
        shape: tokens, layers, K/V heads, head size.
    """
    import torch

    tokens, layers, heads, size = shape
    normed = torch.empty_like(context_states)
    ops.rms_norm(normed, context_states, model._hidden_norm_weight, model._rms_norm_eps)
    flat = gemm.multiply(model._dflash2_context, normed, model._fused_kv_bias)
    both = flat.view(tokens, layers, 2, heads, size).permute(2, 1, 0, 3, 4).contiguous()
    return both[0], both[1]
