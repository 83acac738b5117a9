"""What a bug report must not hold does not stay, whatever it stands in; what names the failure does."""

from __future__ import annotations

import ipaddress
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_serve.observe.redact import Redactor, for_this_machine

REDACT = Redactor(secrets=("s3cret/of+ours",), names=("quentin", "workbench7"), homes=("/srv/people/quentin",))
CONTEXTS = [
    "{}",
    "(APIServer pid=7) ERROR 11-30 03:36:24 [core.py:1] ValueError: {} is bad",
    "non-default args: {{'model': '{}', 'port': 8000}}",
    'INFO:     {} - "POST /v1/chat/completions HTTP/1.1" 200 OK',
    "File \"{}\", line 3",
    "a={}, b=({}) [{}]",
]  # fmt: skip
CONTEXT = st.sampled_from(CONTEXTS)
WORD = st.text(string.ascii_letters + string.digits, min_size=20, max_size=40)


@given(CONTEXT, st.sampled_from(["hf_", "sk-", "ghp_", "github_pat_", "nvapi-", "glpat-"]), WORD)
def test_tokens_with_a_known_shape_go(context: str, prefix: str, word: str) -> None:
    assert word not in REDACT(context.replace("{}", prefix + word))


@given(
    st.sampled_from(["--api-key {}", "--api-key={}", "VLLM_API_KEY={}", "HF_TOKEN: '{}'", '"password": "{}"',
                     "'api_key': ['{}', '{}']", "Authorization: Bearer {}", "client_secret={}", "hub_token={}",
                     "https://user:{}@example.org/x", "https://example.org/x?access_token={}&b=1"]),
    st.text(string.ascii_letters + string.digits + "_-.", min_size=3, max_size=40).filter(lambda s: s[0].isalnum()),
)  # fmt: skip
def test_a_value_whose_name_says_secret_goes(form: str, value: str) -> None:
    marked = f"Q9z{value}"
    assert marked not in REDACT(form.replace("{}", marked))


@given(CONTEXT, st.ip_addresses(v=4))
def test_only_local_ipv4_addresses_stay(context: str, address: ipaddress.IPv4Address) -> None:
    local = any(address in ipaddress.ip_network(net) for net in ("10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16",
                "172.16.0.0/12", "192.168.0.0/16", "0.0.0.0/32", "255.255.255.255/32"))  # fmt: skip
    text = REDACT(context.replace("{}", str(address)))
    assert (str(address) in text) == local


@given(CONTEXT, st.ip_addresses(v=6))
def test_public_ipv6_addresses_go(context: str, address: ipaddress.IPv6Address) -> None:
    private = address in ipaddress.ip_network("fc00::/7") or address in ipaddress.ip_network("fe80::/10")
    if not private and address not in (ipaddress.ip_address("::"), ipaddress.ip_address("::1")):
        text = REDACT(context.replace("{}", address.exploded))
        assert address.exploded not in text


NAME = st.text(string.ascii_lowercase, min_size=5, max_size=12)


@given(st.sampled_from(["/home/{}/x", "/Users/{}/models", "C:\\Users\\{}\\x", "user={}", "uid=1000({})",
                        "'username': '{}'", "mail to {}@example.org"]), NAME)  # fmt: skip
def test_user_names_go(form: str, name: str) -> None:
    name = f"zq{name}"
    assert name not in REDACT(form.replace("{}", name))


@given(st.sampled_from(["prompt: '{}'", "'messages': [{{'role': 'user', 'content': '{}'}}]", "generated text: {}",
                        "prompt='{}', params=x", "Received request cmpl-1: prompt: '{}', sampling", '"content": "{}"']),
       st.lists(NAME, min_size=2, max_size=9))  # fmt: skip
def test_what_people_wrote_goes(form: str, words: list[str]) -> None:
    words = [f"zq{word}" for word in words]
    assert not any(word in REDACT(form.replace("{}", " ".join(words))) for word in words)


@given(st.lists(st.integers(1000, 250_000), min_size=3, max_size=20))
def test_token_ids_go(ids: list[int]) -> None:
    text = REDACT(f"NewRequestData(req_id=1,prompt_token_ids={ids},mm_features=[]) rejected tokens {ids} for request a")
    assert str(ids) not in text


@given(CONTEXT)
def test_names_and_secrets_of_this_machine_go(context: str) -> None:
    for private in ("s3cret/of+ours", "quentin", "workbench7", "/srv/people/quentin/models"):
        assert private not in REDACT(context.replace("{}", private))


@given(st.text(max_size=400) | st.text(string.printable, max_size=400))
def test_any_text_is_taken_and_a_second_pass_changes_nothing_more(text: str) -> None:
    assert REDACT(REDACT(text)) == REDACT(text)


@pytest.mark.parametrize(
    "line",
    [
        "(EngineCore pid=1061) INFO 11-30 02:27:09 [gpu_worker.py:513] Using V2 Model Runner",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 784.00 MiB. GPU 0 has 31.36 GiB",
        "Chunked prefill is enabled with max_num_batched_tokens=8192.",
        "vllm==0.33.0 torch==2.14.0 nvidia-cudnn-cu13==9.20.0.48",
        "Resolved architecture: Qwen3_5MoeForConditionalGeneration",
        "revision 017b9c7a1e2f3a4b5c6d7e8f9a0b1c2d3e4f5a6b sha256:0123456789abcdef0123456789abcdef0123456789abcdef",
        "NVRM: Xid (PCI:0000:01:00): 79, pid=1234, GPU has fallen off the bus.",
        "Free memory on device cuda:0 (22.75/24.0 GiB) on startup is less than desired GPU memory utilization",
        "Available routes are: /v1/chat/completions, 127.0.0.1:8000, 192.168.1.4, ::1, 12:30:45",
        "  File \"/opt/venv/lib/python3.12/site-packages/vllm/v1/engine/core.py\", line 1510, in run_engine_core",
        "tokenizer='/models/target', tokenizer_mode=auto, skip_tokenizer_init=False, seed=0",
    ],
)  # fmt: skip
def test_what_names_a_failure_stays(line: str) -> None:
    assert REDACT(line) == line


def test_common_words_are_nobodys_name() -> None:
    assert Redactor(names=("root", "vllm", "x"))("root ran vllm in x") == "root ran vllm in x"


def test_this_machines_secrets_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "unlikely/value+1")
    monkeypatch.setenv("USER", "quentin")
    text = for_this_machine(["another-one-9"])("unlikely/value+1 another-one-9 quentin's")
    assert text == "<secret> <secret> <name>'s"


@pytest.mark.parametrize(
    "line",
    [
        "INFO [request_logger.py:119] Generated response chatcmpl-1 (streaming): output: 'Dear Mr Meyer', f: stop",
        "{'type': 'missing', 'loc': ('body',), 'input': 'Dear Mr Meyer'}",
        "'query': 'Dear Mr Meyer'",
        'arguments: {"name": "Dear Mr Meyer"}',
        "instructions='Dear Mr Meyer'",
        "SamplingParams(n=1, stop=['Dear Mr Meyer'], bad_words=[])",
    ],
)
def test_what_vllm_logs_of_requests_and_answers(line: str) -> None:
    assert "Meyer" not in REDACT(line)
