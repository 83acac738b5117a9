"""A Triton backend named `cpu` that exists for the interpreter alone.

Why: DFlash2 needs vLLM's V2 runner, whose kernels are Triton. vLLM's CPU build uses Triton only when a
backend named `cpu` is registered, and no such wheel is published. Under `TRITON_INTERPRET=1` kernels run as
NumPy code, so nothing has to be compiled: Triton only asks the backend which device is current.

Triton imports `compiler` and `driver` of every registered backend in every process:

- beside a GPU, and with a vLLM that isn't a CPU build, this backend is never active and changes nothing;
- in vLLM's CPU build without `TRITON_INTERPRET` it steps aside (see `compiler.py`), so vLLM runs exactly as
  it does when the backend isn't installed.

Unnecessary once a triton-cpu wheel is published, or once vLLM's CPU build accepts the interpreter by itself.
"""
