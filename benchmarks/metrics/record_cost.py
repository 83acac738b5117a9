#!/usr/bin/env python3
"""CPU time of one `DraftStatLogger.record`, in the engine's environment and without an engine.

    ENVIRONMENT/bin/python benchmarks/metrics/record_cost.py

Beside a GPU a step is some ten milliseconds and the front end is another process than the engine; this is the time
that our logger takes there, without what other processes of the machine do to a wall clock.
"""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

from dflash2_patches.metrics import DraftStatLogger
from vllm.v1.spec_decode.metrics import SpecDecodingStats

CALLS = 20_000


def main() -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="tiny"),
        speculative_config=SimpleNamespace(num_speculative_tokens=7),
    )
    logger = DraftStatLogger(vllm_config=config, engine_indexes=[0])
    out = {}
    for requests in (1, 4, 64):
        stats = SpecDecodingStats.new(7)
        for request in range(requests):
            stats.observe_draft(num_draft_tokens=7, num_accepted_tokens=request % 8)
        step = SimpleNamespace(spec_decoding_stats=stats)
        start = time.process_time()
        for _ in range(CALLS):
            logger.record(step, None)
        out[f"record_us_{requests}_requests"] = round(1e6 * (time.process_time() - start) / CALLS, 2)
    print(json.dumps(out, indent=2))


if __name__ == "__main__":
    main()
