"""What a person watches: right rates over the last seconds, and the truth when the server stops answering."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from dflash_serve.observe.check import Expected
from dflash_serve.observe.gpu import Gpu, read
from dflash_serve.observe.live import WINDOW, View, Watcher
from dflash_serve.observe.metrics import MetricsError, Snapshot, parse
from dflash_serve.observe.screen import bar, render, sparkline

from .replay import DATA

IDLE = (DATA / "vllm-0.32.0-tiny-idle.txt").read_text()
BUSY = (DATA / "vllm-0.32.0-tiny-busy.txt").read_text()
H200 = Gpu(0, "NVIDIA H200", "GPU-1", 98 * 2**30, 140 * 2**30, 512.3, 700.0, 0.87, 61.0)


class Script:
    """Snapshots one after the other, and a clock that the test moves."""

    def __init__(self, *texts: str | None) -> None:
        self._texts: Iterator[str | None] = iter(texts)
        self.now = 100.0

    def scrape(self) -> Snapshot:
        text = next(self._texts)
        if text is None:
            raise MetricsError("no metrics from there: ConnectionError")
        return parse(text)


def shown(view: View, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(view, [{"output_tok_s": 1.0}, {"output_tok_s": 2.0}], source="http://host:8000", width=width))
    return console.export_text()


def watcher(script: Script, **expected: float) -> Watcher:
    return Watcher(script.scrape, lambda: (H200,), expected=Expected(**expected), clock=lambda: script.now)  # type: ignore[arg-type]


def test_rates_are_of_the_time_between_two_looks() -> None:
    script = Script(IDLE, BUSY)
    watch = watcher(script, acceptance_min=2.0)
    first = watch.look()
    assert first.output_tok_s is None
    assert first.acceptance_total == pytest.approx(1 + 463 / 350)
    script.now += 3.0
    view = watch.look()
    assert view.output_tok_s == pytest.approx(45 / 3)
    assert view.drafts_s == pytest.approx(17 / 3)
    assert view.acceptance_length == pytest.approx(1 + 24 / 17)
    assert view.positions[0] == pytest.approx(11 / 17)
    assert view.conditional[1] == pytest.approx(4 / 11)
    assert (view.running, view.waiting) == (4, 2)
    assert view.band == (2.0, None)
    assert view.findings == ()


def test_the_window_slides_and_forgets() -> None:
    script = Script(IDLE, IDLE, BUSY, BUSY, BUSY)
    watch = watcher(script)
    for _ in range(3):
        view = watch.look()
        script.now += WINDOW / 2
    assert view.output_tok_s == pytest.approx(45 / WINDOW)
    assert watch.look().output_tok_s == pytest.approx(45 / WINDOW)
    script.now += WINDOW / 2
    view = watch.look()
    assert view.output_tok_s == 0
    assert [finding[0] for finding in view.findings] == ["engine-wedged"]


def test_a_server_that_stops_answering_stays_with_its_age_and_comes_back() -> None:
    script = Script(IDLE, BUSY, None, BUSY)
    watch = watcher(script)
    watch.look()
    script.now += 2
    watch.look()
    script.now += 2
    gone = watch.look()
    assert (gone.error, gone.age) == ("no metrics from there: ConnectionError", 2)
    assert gone.output_tok_s == pytest.approx(45 / 2)
    assert "NO ANSWER for 2 s" in shown(gone)
    assert watch.history[-1][1] == {}
    script.now += 2
    assert watch.look().error == ""


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ("vllm:num_requests_running", "the text lacks vllm:num_requests_running"),
        ("vllm:spec_decode_num_accepted_tokens_total", "drafts of tiny engine 0 but no accepted tokens"),
    ],
)
def test_a_text_that_cannot_be_judged_is_no_answer(part: str, told: str) -> None:
    """A proxy that drops a figure must not end the view."""
    broken = "".join(line + "\n" for line in BUSY.splitlines() if not line.startswith(part))
    script = Script(broken, IDLE, broken, BUSY)
    watch = watcher(script)
    assert told in watch.look().error
    assert watch.look().output_tok_s is None
    script.now += 2
    seen = watch.look()
    assert told in seen.error
    assert seen.age == 2
    assert "NO ANSWER for 2 s" in shown(seen)
    script.now += 2
    good = watch.look()
    assert (good.error, good.output_tok_s) == ("", pytest.approx(45 / 4))


def test_looks_further_apart_than_the_window_still_have_rates() -> None:
    script = Script(IDLE, BUSY, None, BUSY)
    watch = watcher(script)
    watch.look()
    script.now += 3 * WINDOW
    view = watch.look()
    assert (view.window, view.output_tok_s) == (3 * WINDOW, pytest.approx(45 / (3 * WINDOW)))
    watch.look()
    script.now += 3 * WINDOW
    assert watch.look().output_tok_s is None  # not a mean over a silence


def test_a_restart_shows_no_negative_rate() -> None:
    script = Script(BUSY, IDLE)
    watch = watcher(script)
    watch.look()
    script.now += 2
    assert watch.look().output_tok_s == pytest.approx(783 / 2)


def test_the_frame_fits_a_terminal_of_80_by_24_and_says_what_matters() -> None:
    script = Script(IDLE, BUSY)
    watch = watcher(script, acceptance_min=3.0, acceptance_max=5.0)
    watch.look()
    script.now += 3
    text = shown(watch.look(), 80)
    lines = text.rstrip("\n").split("\n")
    assert len(lines) <= 24
    assert max(len(line.rstrip()) for line in lines) <= 80
    for part in (
        "15.0 tok/s",
        "2.41 tokens",
        "band 3–5",
        "4 run",
        "2 wait",
        "position 1",
        "65%",
        "98.0 of 140 GiB",
        "512 W",
    ):
        assert part in text, part


@pytest.mark.parametrize("width", [40, 60, 80, 132, 300])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    script = Script(IDLE, BUSY)
    watch = watcher(script)
    watch.look()
    script.now += 3
    lines = shown(watch.look(), width).rstrip("\n").split("\n")
    assert len(lines) == 15
    assert max(len(line.rstrip()) for line in lines) <= width


def test_several_engines_have_rows_and_findings_are_told() -> None:
    dead = BUSY.replace('num_accepted_tokens_total{engine="0",model_name="tiny"} 487.0',
                        'num_accepted_tokens_total{engine="0",model_name="tiny"} 0.0')  # fmt: skip
    both = BUSY + "".join(
        line.replace('engine="0"', 'engine="1"') + "\n" for line in dead.splitlines() if 'engine="0"' in line
    )
    script = Script(both, both)
    watch = watcher(script)
    watch.look()
    script.now += 1
    view = watch.look()
    assert [row.label for row in view.engines] == ["tiny engine 0", "tiny engine 1"]
    assert "tiny engine 1" in shown(view)


def test_a_server_without_our_plugin_and_without_a_gpu() -> None:
    plain = "".join(line + "\n" for line in BUSY.splitlines() if not line.startswith(("dflash:", "# TYPE dflash:")))
    script = Script(plain, plain)
    watch = Watcher(script.scrape, tuple, clock=lambda: script.now)
    watch.look()
    script.now += 1
    assert "GPU" not in shown(watch.look())


def test_bars_and_curves() -> None:
    assert bar(0.5, 4) == "██··"
    assert bar(None, 4) == "····"
    assert bar(2.0, 4) == "████"
    assert sparkline([0.0, None, 4.0, 8.0], 6) == "  ▁ ▄█"
    assert sparkline([], 3) == "   "


def test_nvml_without_a_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import pynvml

    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    assert read() == ()


def test_gpus_that_are_lost_while_they_are_read_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def lost(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    for name in ("nvmlDeviceGetCount", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, lost)
    assert read() == ()
