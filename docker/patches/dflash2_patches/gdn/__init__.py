"""Verification of draft tokens by gated delta net layers that keeps one recurrent state a request.

Stock vLLM stores the state after every query token, so that a rejection can go back to any of them. Here a
verification stores what a replay needs instead (key, delta and decay of each token), and the next verification
replays the accepted tokens on the one committed state before it goes on. docs/gdn-verification.md has the design.

    reference.py  the rule in plain PyTorch, sequential and in closed form: what the kernels are tested against
    records.py    the per-token data between two verifications: shapes, sizes, allocation
    kernels.py    Triton: step plan, verification (sequential and in closed form), commit; tiles.py is inlined there
    verify.py     checked entry points, and the reasons why a layer stays with stock
    align.py      states at block boundaries, for prefix caching

Nothing here is put in force by the plugin: these are functions that take tensors.
"""
