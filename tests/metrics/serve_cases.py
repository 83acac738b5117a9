"""What tests of a running server call, so that one start serves them all."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.serve.conftest import Api, free_port

from .prom import Prometheus, check_everything_has_data


@contextmanager
def load(api: Api, prompts: Sequence[str], *, width: int = 4, tokens: int = 32) -> Iterator[None]:
    """Requests from `width` clients until the block ends."""
    stop = threading.Event()
    endless = itertools.cycle(prompts)

    def client() -> None:
        while not stop.is_set():
            api.greedy(next(endless), tokens)

    clients = [threading.Thread(target=client) for _ in range(width)]
    for thread in clients:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in clients:
            thread.join(120)


def prometheus_sees_everything(api: Api, prompts: Sequence[str], home: Path) -> None:
    """A real Prometheus beside the real server: figures move, every rule and panel has data, nothing fires."""
    prometheus = Prometheus(home, api.url.removeprefix("http://"), free_port(), key=api.key)
    try:
        before = prometheus.until('vllm:spec_decode_num_drafts_total{job="dflash-serve"}', 20)[0]["value"][1]
        with load(api, prompts, width=2):
            # The drafter's sample is every 64th step, so its figures are the last to move.
            prometheus.until("instance:draft_share:rate5m > 0", 240)
            prometheus.until("instance:request_output_tokens:rate5m > 0", 30)
            prometheus.until("instance:requests_running:sum >= 1", 20)
            check_everything_has_data(prometheus)
        assert prometheus.value("vllm:spec_decode_num_drafts_total") > float(before)
        assert prometheus.value("instance:acceptance_length:rate5m") > 1.5
        assert prometheus.value("dflash:expected_acceptance_length_min") == 2.2
        assert prometheus.value("dflash:max_model_len") == prometheus.value("dflash:expected_max_model_len") == 4096
        assert prometheus.value("dflash:kv_pool_tokens") > 0
        assert prometheus.firing() == set()
        scraped = prometheus.value('scrape_samples_post_metric_relabeling{job="dflash-serve"}')
        whole = prometheus.value('scrape_samples_scraped{job="dflash-serve"}')
        print(f"{scraped:.0f} of {whole:.0f} samples a scrape are kept")
        assert scraped < whole
    finally:
        prometheus.close()
