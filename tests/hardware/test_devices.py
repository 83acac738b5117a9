"""What `--gpus` names: whole GPUs and MIG slices, on described machines under the real bindings."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from fake_machine import describe, inventory_of
from hypothesis import given
from hypothesis import strategies as st
from machine_cli import Call

from dflash_serve.errors import DFlashError, PreflightRefused, UsageError
from dflash_serve.hardware.devices import choose_devices

RECIPE = "qwen3.8-27b-nvfp4"
MIB = 2**20


def cut(*used_mib: int, whole: int = 0) -> dict[str, Any]:
    """An H200 cut into slices of 71424 MiB with so much in use, and `whole` uncut ones behind it."""
    data = describe("h200-mig")
    first = data["gpus"][0]
    part = first["mig"]["1"]
    first["mig"] = {
        str(number): {**part, "memory_mib": {"total": 71424, "reserved": 0, "used": used}}
        for number, used in enumerate(used_mib)
    }
    for _ in range(whole):
        gpu = {key: value for key, value in first.items() if not key.startswith("mig")}
        data["gpus"].append(gpu)
    return data


def test_a_slice_is_planned_with_its_own_memory_and_uuid(call: Call) -> None:
    done = call(cut(43, 30000), "plan", RECIPE, "--runtime", "native", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    (gpu,) = plan["hardware"]["gpus"]
    assert (gpu["index"], gpu["uuid"], gpu["memory_bytes"]) == (0, "MIG-0-0", 71424 * MIB)
    assert plan["environment"]["CUDA_VISIBLE_DEVICES"] == "MIG-0-0"
    assert plan["shape"]["tensor_parallel_size"]["value"] == 1
    assert plan["memory"]["gpu_bytes"] == 71424 * MIB
    assert any(f["id"] == "gpu-mig" and "MIG-0-0" in f["what"] for f in plan["findings"])


def test_a_slice_by_uuid_passes_the_preflight_and_a_busy_one_does_not(call: Call) -> None:
    machine = cut(43, 30000, whole=1)  # two GPUs, so that vLLM finds slice 1
    for word, code in (("MIG-0-0", 0), ("0:0", 0), ("MIG-0-1", 4), ("0:1", 4)):
        # The weights of that recipe need not fit on the disk of whoever runs this.
        done = call(machine, "preflight", RECIPE, "--gpus", word, "--port", "18431", "--force", "disk-space", "--json")
        findings = {finding["id"]: finding for finding in json.loads(done.stdout)["findings"]}
        assert done.returncode == code, (word, findings)
        if code:
            assert "slice 1" in findings["gpu-busy"]["what"]


def test_the_process_on_a_slice_is_named() -> None:
    machine = cut(43, 30000)
    machine["gpus"][0]["mig"]["1"]["compute"] = [["$PID", 29000]]
    first, second = inventory_of(machine).slices()
    assert first.processes == ()
    assert [process.pid for process in second.processes] == [os.getpid()]
    assert second.processes[0].name is not None
    assert second.label == "GPU 0 slice 1 (NVIDIA H200 MIG 3g.71gb)"


@pytest.mark.parametrize("words", [("MIG-0-0", "MIG-0-1"), ("MIG-0-0", "1"), ("0", "1")])
def test_tensor_parallelism_over_slices_is_refused_with_the_reason(words: tuple[str, ...]) -> None:
    with pytest.raises(PreflightRefused) as caught:
        choose_devices(inventory_of(cut(43, 43, whole=1)), words)
    (finding,) = caught.value.findings
    assert finding.id == "gpu-mig"
    assert "one slice only" in finding.what
    assert "--gpus MIG-0-" in finding.fix


def test_a_tensor_parallel_size_over_one_slice_is_refused(call: Call) -> None:
    done = call(cut(43, 43), "plan", RECIPE, "--set", "tensor_parallel_size=2")
    assert done.returncode in {2, 4}
    assert "Traceback" not in done.stderr


def test_whole_gpus_come_before_slices() -> None:
    inventory = inventory_of(cut(43, 43, whole=1))
    assert choose_devices(inventory, None) == (inventory, None, [])
    assert choose_devices(inventory, ("1",))[1] == (1,)


def test_the_freest_slice_that_vllm_finds_is_taken() -> None:
    # One GPU: vLLM finds slice 0 alone, however free the others are.
    assert choose_devices(inventory_of(cut(20000, 43)), None)[0].gpus[0].slice == 0
    assert choose_devices(inventory_of(cut(20000, 43, whole=1)), ("0",))[0].gpus[0].slice == 1


def test_a_slice_that_vllm_would_not_find_is_refused(call: Call) -> None:
    done = call(
        cut(43, 43), "preflight", RECIPE, "--gpus", "MIG-0-1", "--runtime", "native", "--json"
    )  # fmt: skip
    assert done.returncode == 4
    found = {finding["id"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert "GPU 1 of 1" in found["gpu-mig-index"]["what"]


def test_a_gpu_in_mig_mode_without_slices(call: Call) -> None:
    for words in (None, ("0",)):
        with pytest.raises(PreflightRefused, match="has no slices"):
            choose_devices(inventory_of(cut()), words)
    assert call(cut(), "plan", RECIPE).returncode == 4


@pytest.mark.parametrize(
    ("word", "said"),
    [("7", "no GPU 7"), ("MIG-", "no GPU MIG-"), ("MIG-0", "begins several"), ("0:9", "no GPU 0:9"), ("x", "no GPU x")],
)
def test_words_that_name_no_device(word: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        choose_devices(inventory_of(cut(43, 43)), (word,))
    assert "0:0, 0:1" in caught.value.fix


def test_uuids_and_their_beginnings_name_whole_gpus() -> None:
    inventory = inventory_of("2x5090")
    uuid = inventory.gpus[1].uuid
    assert uuid is not None
    assert choose_devices(inventory, (uuid,))[1] == (1,)
    assert choose_devices(inventory, (uuid[:14], "0"))[1] == (1, 0)


INVENTORIES = [inventory_of(cut(43, 43, whole=1)), inventory_of("2x5090"), inventory_of("no-gpus")]


@given(st.sampled_from(INVENTORIES), st.lists(st.text(max_size=12) | st.sampled_from(["0", "0:1", "MIG-0-1", "1"])))
def test_any_words_give_devices_or_our_errors(inventory: Any, words: list[str]) -> None:
    try:
        made, indices, _ = choose_devices(inventory, words)
    except DFlashError:
        return
    assert indices is not None
    assert all(made.gpu(index) is not None for index in indices)
