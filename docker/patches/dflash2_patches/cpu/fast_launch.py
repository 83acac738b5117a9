"""Launch interpreted kernels without upstream's cost per launch.

Upstream's `GridExecutor` does four things at every launch that are the same every time or needless on a CPU:
it replaces every function of `triton.language` by its interpreted form and puts it back afterwards,
reads the kernel's signature, copies every argument's storage to the host, and copies it
back. vLLM launches dozens of kernels a step, so this decides the speed.

Here the language is replaced once for each module of kernels and stays so (this process only interprets),
signatures are read once a kernel, and tensors are used where they are. Kernels therefore see the caller's
memory, as on a GPU. A tensor that isn't in host memory falls back to upstream's way.

Unnecessary when the interpreter caches its patched language, or when a compiled CPU backend is published.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from itertools import product
from typing import Any

ID = "cpu-interpreter-fast-launch"

_MARK = "_dflash2_fast_launch"


@dataclass(frozen=True)
class _Signature:
    order: tuple[str, ...]
    names: frozenset[str]
    constants: frozenset[str]
    defaults: dict[str, Any]


class _Kept:
    """Stands for upstream's patch scope; the language stays patched."""

    def restore(self) -> None:
        """Keep the language patched."""


def apply() -> None:
    """Replace `GridExecutor.__init__` and `__call__` and `_patch_lang`. Idempotent."""
    from triton.runtime import interpreter

    executor = interpreter.GridExecutor
    if hasattr(executor, _MARK):
        return
    _patch_language_once(interpreter)
    original_init, original_call = executor.__init__, executor.__call__
    signatures: dict[Any, _Signature] = {}

    def init(self: Any, fn: Any, arg_names: Any, grid: Any, pre_run_hooks: Any = ()) -> None:
        if fn not in signatures:
            original_init(self, fn, arg_names, grid, list(pre_run_hooks))
            signatures[fn] = _read(fn, self.constexprs)
            return
        self.fn, self.arg_names, self.grid, self.pre_run_hooks = fn, arg_names, grid, pre_run_hooks
        self.constexprs = signatures[fn].constants

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        signature = signatures[self.fn]
        kwargs = {name: value for name, value in kwargs.items() if name in signature.names}
        if not all(map(_on_host, args)) or not all(map(_on_host, kwargs.values())):
            original_call(self, *args, **kwargs)
            return
        for hook in self.pre_run_hooks:
            hook(*args, **kwargs)
        interpreter._patch_lang(self.fn)
        values = {**signature.defaults, **dict(zip(signature.order, args, strict=False)), **kwargs}
        values = {
            name: value if name in signature.constants else interpreter._implicit_cvt(value)
            for name, value in values.items()
        }
        _run(interpreter, self.fn, self.grid(values) if callable(self.grid) else self.grid, values)

    executor.__init__ = init
    executor.__call__ = call
    setattr(executor, _MARK, True)


def _patch_language_once(interpreter: Any) -> None:
    original = interpreter._patch_lang
    # The module namespaces themselves are kept: an id alone could be reused by a later one.
    done: dict[int, Any] = {}
    kept = _Kept()

    def patch(fn: Any) -> _Kept:
        namespace = fn.__globals__
        if id(namespace) not in done:
            original(fn)
            done[id(namespace)] = namespace
        return kept

    interpreter._patch_lang = patch


def _read(fn: Any, constants: Any) -> _Signature:
    parameters = inspect.signature(fn).parameters
    return _Signature(
        order=tuple(parameters),
        names=frozenset(parameters),
        constants=frozenset(constants),
        defaults={name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty},
    )


def _on_host(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_on_host, value))
    if hasattr(value, "base") and hasattr(value, "block_shape"):  # a tensor descriptor
        return _on_host(value.base)
    device = getattr(value, "device", None)
    return device is None or not hasattr(value, "data_ptr") or getattr(device, "type", "cpu") == "cpu"


def _run(interpreter: Any, fn: Any, grid: Any, values: dict[str, Any]) -> None:
    dims = tuple(grid) + (1,) * (3 - len(grid))
    builder = interpreter.interpreter_builder
    builder.set_grid_dim(*dims)
    try:
        for index in product(*map(range, dims)):
            builder.set_grid_idx(*index)
            fn(**values)
    except Exception as error:
        raise interpreter.InterpreterError(f"{fn.__name__}: {error!r}") from error
