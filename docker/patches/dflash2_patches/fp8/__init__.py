"""Draft-only fp8 weights: what the patches `fp8-draft-head` and `fp8-draft-body` compute with.

    memory.py   bytes that the copies cost or free, from a drafter's configuration (stdlib only)
    rows.py     quantization of a matrix's rows in plain PyTorch, and the reference product
    choice.py   what the measurements decide (choice.toml): product, matrices that stay, rows (stdlib only)
    gemm.py     the ways to multiply with such a matrix, and which one a shape gets
    kernels.py  Triton: the product at few rows, and the exact scores of a short list
    head.py     the candidates of a drafter's positions from an fp8 copy of the LM head
    body.py     a drafter's linear layers and its context projection, converted after loading

Only the drafts depend on any of it: the target verifies every token with its own weights.
"""
