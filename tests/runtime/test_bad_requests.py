"""Every request that must be refused is, with OpenAI's error body, in both modes, and the server lives on."""

import json
import random
import socket

import httpx
import pytest

from planc.runtime.protocol import MAX_CHOICES, MAX_SAMPLES
from planc.runtime.server import MAX_BODY_BYTES
from tests.runtime.live import TOKENIZER, VOCAB, events, make_service, serving

CHAT = {"messages": [{"role": "user", "content": "fox"}], "max_tokens": 4}
TEXT = {"prompt": "fox", "max_tokens": 4}


@pytest.fixture(scope="module")
def client():
    service = make_service(model_len=64)
    with serving(service) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def check_lives(client):
    response = client.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True})
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 2
    assert client.get("/health").status_code == 200


def refused(response, status=400):
    assert response.status_code == status, (response.status_code, response.text)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


BOTH = {
    "stream_options without stream": ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
    "temperature below 0": ({"temperature": -0.1}, "temperature"),
    "temperature a word": ({"temperature": "hot"}, "temperature"),
    "temperature beyond float32": ({"temperature": 1e39}, "temperature"),
    "repetition_penalty beyond float32": ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    "top_p 0": ({"top_p": 0}, "top_p"),
    "top_p above 1": ({"top_p": 1.1}, "top_p"),
    "top_k a fraction": ({"top_k": 0.01}, "top_k"),
    "top_k -2": ({"top_k": -2}, "top_k"),
    "min_p above 1": ({"min_p": 2}, "min_p"),
    "n 0": ({"n": 0}, "n"),
    "n negative": ({"n": -1}, "n"),
    "n too many": ({"n": MAX_SAMPLES + 1}, "n"),
    "best_of": ({"best_of": 2}, "best_of"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens"),
    "max_tokens negative": ({"max_tokens": -5}, "max_tokens"),
    "min_tokens above max_tokens": ({"min_tokens": 5}, "min_tokens"),
    "presence_penalty": ({"presence_penalty": 2.5}, "presence_penalty"),
    "frequency_penalty": ({"frequency_penalty": -2.5}, "frequency_penalty"),
    "repetition_penalty": ({"repetition_penalty": 0}, "repetition_penalty"),
    "seed too large": ({"seed": 2**63}, "seed"),
    "logit_bias key no number": ({"logit_bias": {"AI": -100}}, "logit_bias"),
    "logit_bias out of vocabulary": ({"logit_bias": {"191222": -100}}, "logit_bias"),
    "allowed_token_ids out of vocabulary": ({"allowed_token_ids": list(range(2000))}, "allowed_token_ids"),
    "allowed_token_ids empty": ({"allowed_token_ids": []}, "allowed_token_ids"),
    "stop_token_ids out of vocabulary": ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
    "stop empty": ({"stop": ""}, "stop"),
    "stop too many": ({"stop": ["x"] * 65}, "stop"),
    "stop a number": ({"stop": 5}, "stop"),
    "use_beam_search": ({"use_beam_search": True}, "use_beam_search"),
    "prompt_logprobs": ({"prompt_logprobs": 1}, "prompt_logprobs"),
    "priority": ({"priority": 1}, "priority"),
    "response_format": ({"response_format": {"type": "json_object"}}, "response_format"),
    "structured_outputs": ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    "cache_salt empty": ({"cache_salt": ""}, "cache_salt"),
    "stream_options malformed": ({"stream": True, "stream_options": 1}, "stream_options"),
}
CHAT_ONLY = {
    "messages empty": ({"messages": []}, "messages"),
    "messages missing": ({"messages": None}, "messages"),
    "message without role": ({"messages": [{"content": "x"}]}, "messages"),
    "template refuses": ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    "top_logprobs without logprobs": ({"top_logprobs": 2}, "top_logprobs"),
    "top_logprobs too many": ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
    "top_logprobs negative": ({"logprobs": True, "top_logprobs": -2}, "logprobs"),
    "tools": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    "tools empty": ({"tools": []}, "tools"),
    "tool_choice": ({"tool_choice": "auto"}, "tool_choice"),
    "continue_final_message": ({"continue_final_message": True}, "continue_final_message"),
    "chat_template": ({"chat_template": "{{ 1 }}"}, "chat_template"),
}
TEXT_ONLY = {
    "prompt missing": ({"prompt": None}, "prompt"),
    "prompt empty": ({"prompt": ""}, "prompt"),
    "prompt empty list": ({"prompt": []}, "prompt"),
    "prompt list of empty": ({"prompt": [""]}, "prompt"),
    "prompt list of empty ids": ({"prompt": [[]]}, "prompt"),
    "prompt one empty": ({"prompt": ["fox", ""]}, "prompt"),
    "prompt mixed": ({"prompt": ["fox", [1]]}, "prompt"),
    "prompt fractions": ({"prompt": [1.5]}, "prompt"),
    "prompt booleans": ({"prompt": [True]}, "prompt"),
    "prompt object": ({"prompt": {}}, "prompt"),
    "prompt out of vocabulary": ({"prompt": [1, VOCAB]}, "prompt"),
    "too many choices": ({"prompt": ["x"] * (MAX_CHOICES // 4 + 1), "n": 4}, "prompt"),
    "prompt negative id": ({"prompt": [-1]}, "prompt"),
    "prompt huge id": ({"prompt": [2**70]}, "prompt"),
    "too many prompts": ({"prompt": ["x"] * (MAX_CHOICES + 1)}, "prompt"),
    "logprobs -1": ({"logprobs": -1}, "logprobs"),
    "logprobs too many": ({"logprobs": 21}, "logprobs"),
    "no tokens": ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
    "suffix": ({"suffix": "x"}, "suffix"),
}
CASES = [
    *(("/v1/chat/completions", CHAT, name, *case) for name, case in {**BOTH, **CHAT_ONLY}.items()),
    *(("/v1/completions", TEXT, name, *case) for name, case in {**BOTH, **TEXT_ONLY}.items()),
]


@pytest.mark.parametrize(
    ("path", "body", "name", "changes", "param"), CASES, ids=[f"{c[0][4:8]}-{c[2]}" for c in CASES]
)
def test_must_be_400(client, path, body, name, changes, param):
    for stream in (False, True):
        error = refused(client.post(path, json={**body, "stream": stream, **changes}))
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param, error


@pytest.fixture(autouse=True)
def _lives(client):
    yield
    check_lives(client)


@pytest.mark.parametrize("stream", [False, True])
def test_context_edges(client, stream):
    """Both counts are stated; L fits, L + 1 does not, and the next request works."""
    fits = client.post("/v1/completions", json={"prompt": [5] * 60, "max_tokens": 4, "stream": stream})
    assert fits.status_code == 200
    error = refused(client.post("/v1/completions", json={"prompt": [5] * 60, "max_tokens": 5, "stream": stream}))
    assert "60 in the prompt" in error["message"]
    assert "5 to generate" in error["message"]
    assert "64" in error["message"]
    assert error["code"] == "context_length_exceeded"
    long = {"messages": [{"role": "user", "content": "fox " * 500}], "stream": stream}
    assert refused(client.post("/v1/chat/completions", json=long))["code"] == "context_length_exceeded"
    for length in (63, 64, 65):
        body = {"prompt": [5] * length, "stream": stream, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == (200 if length < 64 else 400)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b'"x"', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800", "max_tokens": 2}', b"[" * 9999],
)
def test_bad_json(client, body):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        refused(client.post(path, content=body, headers={"content-type": "application/json"}))


def test_nan_and_infinity_are_refused(client):
    for value in ("NaN", "Infinity", "1e999"):
        refused(client.post("/v1/completions", content='{"prompt": "x", "temperature": ' + value + "}"))


def test_body_too_large(client):
    refused(client.post("/v1/completions", content=b" " * (MAX_BODY_BYTES + 1)), 413)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(client, monkeypatch, path):
    """30 MB would take most of a minute to encode."""
    assert TOKENIZER.longest_token is not None  # kept from here on
    monkeypatch.setattr(TOKENIZER, "raw", None)  # whoever encodes fails
    chat = "chat" in path
    text = "fox jumps " * 3_000_000
    body = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    error = refused(client.post(path, json=body))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages" if chat else "prompt")
    assert "64 tokens" in error["message"]
    monkeypatch.undo()


def test_unknown_model_path_and_method(client):
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT), ("/tokenize", {"prompt": "x"})):
        assert refused(client.post(path, json={**body, "model": "gpt-5"}), 404)["code"] == "model_not_found"
    refused(client.get("/v1/nothing"), 404)
    refused(client.get("/v1/completions"), 405)


def test_tokenize_and_detokenize_refusals(client):
    refused(client.post("/tokenize", json={}))
    refused(client.post("/tokenize", json={"prompt": "x", "messages": []}))
    refused(client.post("/detokenize", json={"tokens": [VOCAB]}))
    refused(client.post("/detokenize", json={"tokens": ["x"]}))


@pytest.mark.parametrize(
    "extra",
    [
        {"user": "me", "metadata": {"a": 1}, "no_such_field": [1]},
        {"top_k": 9_999_999},
        {"top_k": -1, "n": None, "stop": None, "stream": None, "logit_bias": None, "temperature": None},
        {"response_format": {"type": "text"}, "tool_choice": "none", "priority": 0, "best_of": 1},
        {"logit_bias": {"5": 1000}, "seed": -1, "stop": []},
        {"temperature": 1e-300, "top_p": 1e-12},
        {"temperature": 1e30, "min_p": 1},
        {"chat_template_kwargs": {"self": 1, "messages": [], "tools": 2, "enable_thinking": False}},
    ],
)
def test_accepted(client, extra):
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        assert client.post(path, json={**body, **extra}).status_code == 200
        assert events(client.post(path, json={**body, **extra, "stream": True}))


JUNK = [None, True, -1, 0, 1, 2**31, 2**64, 0.5, 1e300, "", "x", "\x00", [], [1], ["x"], [[]], {}, {"x": 1}, {"1": 1}]
FIELDS = [
    "model",
    "messages",
    "prompt",
    "n",
    "best_of",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "logit_bias",
    "allowed_token_ids",
    "stream",
    "stream_options",
    "cache_salt",
    "echo",
    "logprobs",
    "top_logprobs",
    "tools",
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "response_format",
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_fuzz_never_5xx(client, path):
    rng = random.Random(path)
    for _ in range(120):
        body = {
            **(CHAT if "chat" in path else TEXT),
            **{rng.choice(FIELDS): rng.choice(JUNK) for _ in range(rng.randrange(1, 3))},
        }
        response = client.post(path, content=json.dumps(body))
        assert response.status_code < 500, (body, response.text)
        if response.status_code != 200:
            refused(response, response.status_code)


def test_no_method_of_a_client_makes_a_series(client):
    for method in ("PROPFIND", "PURGE", "M1"):
        assert client.request(method, "/health").status_code == 405
    text = client.get("/metrics").text
    assert 'method="other"' in text
    assert not any(f'method="{method}"' in text for method in ("PROPFIND", "PURGE", "M1"))


def raw(client, *pieces):
    """What the server answers to these bytes, sent one piece after the other, until it hangs up."""
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=30) as connection:
        answer = b""
        try:
            for piece in pieces:
                connection.sendall(piece)
            while received := connection.recv(65536):
                answer += received
        except ConnectionError:  # it hung up while the rest was on its way
            pass
        return answer


def test_what_is_no_http_is_a_400(client):
    assert raw(client, b"\x16\x03\x01 hello\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert raw(client, b"GET /health HTTP/1.1\r\nno colon\r\n\r\n").startswith(b"HTTP/1.1 400")
    check_lives(client)


@pytest.mark.parametrize("kind", ["one header", "many headers", "a long path"])
def test_endless_headers_are_cut_off(client, kind):
    first = b"GET /" if kind == "a long path" else b"GET /health HTTP/1.1\r\nx: "
    rest = [b"y" * 8000 + (b"\r\nx%d: " % i if kind == "many headers" else b"") for i in range(2000)]
    answer = raw(client, first, *rest)  # without an end: only one who hangs up ends it
    assert answer.startswith(b"HTTP/1.1 400") or not answer  # a reset can overtake the answer
    check_lives(client)


def test_headers_of_the_size_that_proxies_allow_pass(client):
    headers = {f"x-{i}": "y" * 4000 for i in range(12)}
    assert client.get("/health", headers=headers).status_code == 200
    assert client.post("/v1/completions", json=TEXT, headers=headers).status_code == 200


def test_a_body_after_an_offered_upgrade_is_read(client):
    """As curl --http2 and Java's client send it."""
    headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQAoAAAAAIAAAAA"}
    response = client.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 2}, headers=headers)
    assert response.status_code == 200


def test_endless_trailers_are_cut_off(client):
    body = json.dumps(TEXT).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    chunk = b"%x\r\n%s\r\n0\r\n" % (len(body), body)
    raw(client, head + chunk, *[b"a: " + b"y" * 8000 + b"\r\n"] * 2000)  # without an end: only one who hangs up ends it
    check_lives(client)


def test_a_client_of_http_1_0_gets_no_chunks(client):
    body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 3, "stream": True, "ignore_eos": True}).encode()
    request = b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    answer = raw(client, request)
    assert b"transfer-encoding" not in answer.lower()
    assert answer.endswith(b"data: [DONE]\n\n")
