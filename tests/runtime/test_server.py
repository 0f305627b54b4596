"""The HTTP surface over a fake model: shapes, stream == non-stream, usage, auth, metrics."""

import asyncio
import copy
import signal
import threading

import httpx
import numpy as np
import pytest

from planc.runtime.errors import RequestError
from planc.runtime.formats import CompletionFormat
from planc.runtime.protocol import StreamOptions
from planc.runtime.sampler import logprobs_of
from planc.runtime.sequence import SamplingParams
from planc.runtime.stream import Doorbell, EventStream, Job
from planc.runtime.web import make_server
from tests.runtime.fake import FakeExecutor, hashed_logits
from tests.runtime.live import TOKENIZER, VOCAB, events, make_service, serving, settle, text_of, wait_for

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "今天天气如何？"}], "max_tokens": 30, "seed": 5}
TEXT = {"model": "fake", "prompt": "the quick brown fox", "max_tokens": 30, "seed": 5}


@pytest.fixture(scope="module")
def service():
    return make_service()


@pytest.fixture(scope="module")
def client(service):
    with serving(service) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def post(client, path, body, **changes):
    response = client.post(path, json={**body, **changes})
    assert response.status_code == 200, response.text
    return response.json()


def test_chat_completion_shape(client):
    found = post(client, "/v1/chat/completions", CHAT)
    assert found["object"] == "chat.completion"
    assert found["id"].startswith("chatcmpl-")
    assert found["model"] == "fake"
    (choice,) = found["choices"]
    assert choice["index"] == 0
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] in ("length", "stop")
    usage = found["usage"]
    prompt = TOKENIZER.encode(TOKENIZER.render_chat(CHAT["messages"]), add_special_tokens=False)
    assert usage["prompt_tokens"] == len(prompt)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_completion_shape(client):
    found = post(client, "/v1/completions", TEXT)
    assert (found["object"], found["id"][:5]) == ("text_completion", "cmpl-")
    assert set(found["choices"][0]) == {"index", "text", "logprobs", "finish_reason", "stop_reason"}


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"temperature": 0, "ignore_eos": True, "max_tokens": 120},
        {"stop": ["e", "夫"], "max_tokens": 100},
        {"stop": "a", "include_stop_str_in_output": True, "min_tokens": 5},
        {"n": 3, "temperature": 1.2},
        {"skip_special_tokens": False, "logit_bias": {"2": 20, "190": 21}},
    ],
)
def test_stream_equals_whole(client, path, body, extra):
    whole = post(client, path, body, **extra)
    response = client.post(path, json={**body, **extra, "stream": True, "stream_options": {"include_usage": True}})
    chunks = events(response)
    assert [c["usage"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert {k: v for k, v in chunks[-1]["usage"].items() if k != "prompt_tokens_details"} == {
        k: v for k, v in whole["usage"].items() if k != "prompt_tokens_details"
    }
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index, choice in enumerate(whole["choices"]):
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert text_of(chunks, index) == text
        ends = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index and c["finish_reason"]]
        assert len(ends) == 1
        assert (ends[0]["finish_reason"], ends[0]["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
    if "n" in extra:
        texts = [c["text"] if "text" in c else c["message"]["content"] for c in whole["choices"]]
        assert len(set(texts)) == 3


def test_first_chat_chunk_has_the_role_and_no_usage_unless_asked(client):
    chunks = events(client.post("/v1/chat/completions", json={**CHAT, "stream": True}))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("usage" not in chunk for chunk in chunks)
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)


def test_prompt_forms_and_choice_order(client):
    ids = TOKENIZER.encode(TEXT["prompt"])
    same = [
        post(client, "/v1/completions", TEXT, prompt=form) for form in (TEXT["prompt"], [TEXT["prompt"]], ids, [ids])
    ]
    assert len({found["choices"][0]["text"] for found in same}) == 1
    both = post(client, "/v1/completions", TEXT, prompt=["lazy dog", TEXT["prompt"]], n=2)
    assert [c["index"] for c in both["choices"]] == [0, 1, 2, 3]
    assert both["choices"][2]["text"] == same[0]["choices"][0]["text"]
    assert both["choices"][2]["text"] != both["choices"][3]["text"]
    assert both["usage"]["prompt_tokens"] == len(ids) + len(TOKENIZER.encode("lazy dog"))


def test_same_seed_same_text_among_others(client):
    alone = post(client, "/v1/completions", TEXT)["choices"][0]["text"]
    crowd = post(client, "/v1/completions", TEXT, prompt=["fox"] * 5 + [TEXT["prompt"]] + ["dog"] * 5)
    assert crowd["choices"][5]["text"] == alone
    assert post(client, "/v1/completions", TEXT, seed=6)["choices"][0]["text"] != alone


def test_top_k_one_is_greedy(client):
    greedy = post(client, "/v1/completions", TEXT, temperature=0)
    assert post(client, "/v1/completions", TEXT, top_k=1)["choices"][0]["text"] == greedy["choices"][0]["text"]


def test_echo(client):
    plain = post(client, "/v1/completions", TEXT)["choices"][0]["text"]
    assert post(client, "/v1/completions", TEXT, echo=True)["choices"][0]["text"] == TEXT["prompt"] + plain
    chunks = events(client.post("/v1/completions", json={**TEXT, "echo": True, "stream": True}))
    assert text_of(chunks) == TEXT["prompt"] + plain


SCORED = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}


def test_echo_with_logprobs_scores_the_prompt(client):
    ids = TOKENIZER.encode(TEXT["prompt"])
    found = post(client, "/v1/completions", TEXT, **SCORED)["choices"][0]
    scores = found["logprobs"]
    assert scores["tokens"][: len(ids)] == [TOKENIZER.token_text(token) for token in ids]
    assert found["text"] == "".join(scores["tokens"])
    assert scores["text_offset"] == [len("".join(scores["tokens"][:i])) for i in range(len(ids) + 1)]
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    logits = hashed_logits(VOCAB)
    for at in range(1, len(ids)):
        want = logprobs_of(logits(np.array(ids[:at])), ids[at], 1)
        assert scores["token_logprobs"][at] == want.logprob
        assert max(scores["top_logprobs"][at].values()) == max(want.logprob, want.top[0][1])
    chosen = max(scores["top_logprobs"][-1].values())
    assert scores["token_logprobs"][-1] == chosen


@pytest.mark.parametrize("changes", [SCORED, {**SCORED, "max_tokens": 0}, {**SCORED, "n": 2, "max_tokens": 9}])
@pytest.mark.parametrize("prompt", ["the quick brown fox", [5, 6, 7], [[5, 6, 7], [8], [9, 300]], ["a", "b fox"]])
def test_scored_prompts_in_every_shape_stream_as_they_are_answered(client, changes, prompt):
    body = {**TEXT, **changes, "prompt": prompt}
    whole = post(client, "/v1/completions", body)
    chunks = events(client.post("/v1/completions", json={**body, "stream": True}))
    alone = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    ids = [TOKENIZER.encode(p) if isinstance(p, str) else p for p in alone for _ in range(changes.get("n", 1))]
    assert len(whole["choices"]) == len(ids)
    for choice, tokens in zip(whole["choices"], ids, strict=True):
        scores = choice["logprobs"]
        assert len({len(values) for values in scores.values()}) == 1
        assert scores["tokens"][: len(tokens)] == [TOKENIZER.token_text(token) for token in tokens]
        assert [value is None for value in scores["token_logprobs"]] == [True] + [False] * (len(scores["tokens"]) - 1)
        assert len(scores["tokens"]) <= len(tokens) + changes["max_tokens"]
        assert text_of(chunks, choice["index"]) == choice["text"]
        mine = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        for name, values in scores.items():
            assert [value for part in mine if part for value in part[name]] == values
    if changes["max_tokens"] == 0:
        assert whole["usage"]["completion_tokens"] == 0
        assert whole["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_echo_alone_needs_no_tokens(client):
    assert post(client, "/v1/completions", TEXT, echo=True, max_tokens=0)["choices"][0]["text"] == TEXT["prompt"]
    chunks = events(client.post("/v1/completions", json={**TEXT, "echo": True, "max_tokens": 0, "stream": True}))
    assert text_of(chunks) == TEXT["prompt"]


def test_chat_logprobs(client):
    changes = {"logprobs": True, "top_logprobs": 3}
    whole = post(client, "/v1/chat/completions", CHAT, **changes)
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == whole["usage"]["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    shown = [entry for entry in content if entry["token"] not in ("</s>", "<|im_end|>")]
    joined = b"".join(bytes(entry["bytes"]) for entry in shown)
    assert joined.decode(errors="replace") == whole["choices"][0]["message"]["content"]
    chunks = events(client.post("/v1/chat/completions", json={**CHAT, **changes, "stream": True}))
    streamed = [e for chunk in chunks for c in chunk["choices"] if c["logprobs"] for e in c["logprobs"]["content"]]
    assert streamed == content


def test_completion_logprobs(client):
    found = post(client, "/v1/completions", TEXT, logprobs=2)["choices"][0]["logprobs"]
    assert (
        len(found["tokens"]) == len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(found["text_offset"])
    )
    assert found["text_offset"][0] == 0
    assert all(found["top_logprobs"][i][token] == found["token_logprobs"][i] for i, token in enumerate(found["tokens"]))
    chunks = events(client.post("/v1/completions", json={**TEXT, "logprobs": 2, "stream": True}))
    streamed = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    assert [offset for part in streamed for offset in part["text_offset"]] == found["text_offset"]


def test_no_max_tokens_means_the_rest_of_the_context(client, service):
    found = post(client, "/v1/chat/completions", {**CHAT, "max_tokens": None, "ignore_eos": True})
    assert found["usage"]["total_tokens"] == service.engine.limits.max_model_len
    assert found["choices"][0]["finish_reason"] == "length"
    assert post(client, "/v1/completions", {"prompt": "x", "ignore_eos": True})["usage"]["completion_tokens"] == 16
    edge = [5] * 250
    assert post(client, "/v1/completions", {"prompt": edge, "ignore_eos": True})["usage"]["completion_tokens"] == 6


def test_max_completion_tokens_wins(client):
    found = post(client, "/v1/chat/completions", CHAT, max_completion_tokens=3, ignore_eos=True)
    assert found["usage"]["completion_tokens"] == 3


def test_cached_tokens_are_reported_and_change_nothing(client):
    body = {**TEXT, "prompt": "naïve café " * 12, "cache_salt": "one"}
    first, second = (post(client, "/v1/completions", body) for _ in range(2))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert first["choices"] == second["choices"]
    other = post(client, "/v1/completions", body, cache_salt="two")
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_content_parts_are_joined(client):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    first = post(client, "/v1/chat/completions", CHAT, messages=[{"role": "user", "content": parts}])
    second = post(client, "/v1/chat/completions", CHAT, messages=[{"role": "user", "content": "one\ntwo"}])
    assert first["choices"] == second["choices"]


def test_models_version_health(client):
    card = client.get("/v1/models").json()["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", 256)
    assert client.get("/v1/models/fake").json() == card
    assert client.get("/v1/models/other").status_code == 404
    assert "version" in client.get("/version").json()
    assert client.get("/health").status_code == 200


def test_tokenize_and_back(client):
    found = client.post("/tokenize", json={"prompt": "客单价 fox", "return_token_strs": True}).json()
    assert found["tokens"] == TOKENIZER.encode("客单价 fox")
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert client.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "客单价 fox"}
    chat = client.post("/tokenize", json={"messages": CHAT["messages"]}).json()
    assert chat["tokens"][0] == 2


def test_metrics_have_vllm_names_and_right_numbers():
    service = make_service()
    with serving(service) as url, httpx.Client(base_url=url) as client:
        post(client, "/v1/completions", {"prompt": [5] * 40, "max_tokens": 7, "ignore_eos": True, "n": 2})
        wait_for(lambda: 'finished_reason="length",model_name="fake"} 2.0' in client.get("/metrics").text)
        lines = client.get("/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    label = '{engine="0",model_name="fake"}'
    expected = {
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
        "vllm:prompt_tokens_total": 80,
        "vllm:generation_tokens_total": 14,
        "vllm:num_preemptions_total": 0,
        "vllm:prefix_cache_queries_total": 80,
        "vllm:prefix_cache_hits_total": 32,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:inter_token_latency_seconds_count": 12,
        "vllm:request_time_per_output_token_seconds_count": 2,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:request_queue_time_seconds_count": 2,
        "vllm:request_inference_time_seconds_count": 2,
        "vllm:request_prefill_time_seconds_count": 2,
        "vllm:request_decode_time_seconds_count": 2,
        "vllm:request_prompt_tokens_sum": 80,
        "vllm:request_generation_tokens_sum": 14,
        "vllm:request_params_n_sum": 2,
        "vllm:request_params_max_tokens_sum": 14,
        "vllm:request_prefill_kv_computed_tokens_sum": 48,
        "vllm:request_num_preemptions_sum": 0,
    }
    found = {}
    for name in expected:
        found[name] = float(values.get(name + label, "nan"))
    assert found == expected
    assert any(k.startswith("vllm:request_success_total") and 'finished_reason="length"' in k for k in values)
    assert any(k.startswith("vllm:cache_config_info") and 'block_size="16"' in k for k in values)
    assert any(k.startswith("http_requests_total") and 'handler="/v1/completions"' in k for k in values)


def test_api_key_guards_all_but_health():
    service = make_service(api_key="sécret")
    with serving(service) as url, httpx.Client(base_url=url) as client:
        for path in ("/v1/models", "/metrics", "/version", "/nothing"):
            response = client.get(path)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert client.post("/v1/completions", json=TEXT).status_code == 401
        assert client.post("/tokenize", json={"prompt": "x"}).status_code == 401
        assert client.get("/health").status_code == 200
        good = {"Authorization": "Bearer sécret".encode()}
        assert client.get("/v1/models", headers=good).status_code == 200
        for bad in (b"Bearer S\xc3\xa9cret", b"Bearer x", b"Basic s\xc3\xa9cret", "sécret".encode()):
            assert client.get("/v1/models", headers={"Authorization": bad}).status_code == 401


def test_model_defaults_come_from_the_generation_config():
    service = make_service(defaults={"temperature": 0.0})
    with serving(service) as url, httpx.Client(base_url=url) as client:
        body = {"prompt": "fox", "max_tokens": 20}
        texts = {post(client, "/v1/completions", body)["choices"][0]["text"] for _ in range(2)}
        assert len(texts) == 1
        hot = {post(client, "/v1/completions", body, temperature=1.0)["choices"][0]["text"] for _ in range(3)}
        assert len(hot) > 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
def test_a_long_request_does_not_hold_up_the_others(monkeypatch, path):
    """While a template or the tokenizer works on one, the loop answers."""
    service, entered, go_on = make_service(model_len=2048), threading.Event(), threading.Event()

    def slow(*args, **kwargs):
        entered.set()
        go_on.wait(10)
        raise RequestError("seen")

    monkeypatch.setattr(service, "tokenizer", copy.copy(service.tokenizer))
    monkeypatch.setattr(service.tokenizer, "render_chat" if "chat" in path else "encode", slow)
    text = "x" * 10_000
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    with serving(service) as url, httpx.Client(base_url=url, timeout=20) as client:
        answers = []
        other = threading.Thread(target=lambda: answers.append(client.post(path, json=body)))
        other.start()
        assert entered.wait(5)
        try:
            assert httpx.get(f"{url}/health", timeout=3).status_code == 200
        finally:
            go_on.set()
            other.join()
        assert "seen" in answers[0].text


def test_draining_refuses_new_requests_and_finishes_running_ones():
    service = make_service(FakeExecutor(200, 16, VOCAB, step_seconds=0.02))
    with serving(service) as url, httpx.Client(base_url=url, timeout=10) as client, httpx.Client(base_url=url) as other:
        with client.stream("POST", "/v1/completions", json={**TEXT, "stream": True, "ignore_eos": True}) as response:
            lines = response.iter_lines()
            next(lines)
            service.draining = True
            assert other.get("/health").status_code == 503
            assert other.post("/v1/completions", json=TEXT).status_code == 503
            assert [line for line in lines if line][-1] == "data: [DONE]"
        service.draining = False


def test_failed_generation_is_an_error_in_both_modes():
    def poison(batch):
        if 9 in batch.ids:
            raise RuntimeError("boom")

    service = make_service(FakeExecutor(200, 16, VOCAB, before=poison))
    with serving(service) as url, httpx.Client(base_url=url) as client:
        body = {"prompt": [5, 9], "max_tokens": 4}
        response = client.post("/v1/completions", json=body)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        chunks = events(client.post("/v1/completions", json={**body, "stream": True}))
        assert "boom" in chunks[-1]["error"]["message"]
        assert client.post("/v1/completions", json={**body, "prompt": [5, 6], "temperature": 0}).status_code == 200


def test_hung_engine_is_unhealthy():
    service = make_service()
    with serving(service) as url, httpx.Client(base_url=url) as client:
        service.engine._closed = "dead"
        assert client.get("/health").status_code == 503
        assert client.post("/v1/completions", json=TEXT).status_code == 503
        service.engine._closed = None
        assert client.get("/health").status_code == 200


def test_first_signal_drains_and_second_forces():
    service = make_service()
    server = make_server(service, 5)
    server.handle_exit(signal.SIGTERM, None)
    assert (service.draining, server.should_exit, server.force_exit) == (True, True, False)
    server.handle_exit(signal.SIGTERM, None)
    assert server.force_exit
    service.engine.close()


def test_a_stream_that_cannot_be_sent_ends_its_sequences():
    """Without any disconnect message, as when a proxy resets the connection in the middle of a write."""
    service = make_service(FakeExecutor(200, 16, VOCAB, step_seconds=0.01))

    async def send(message):
        raise OSError("connection reset")

    async def go():
        job = Job(service.engine, Doorbell(), [[5, 6]], SamplingParams(max_tokens=200, ignore_eos=True), 1)
        form = CompletionFormat("fake", "", TOKENIZER)
        with pytest.raises(OSError, match="reset"):
            await EventStream(job, form.events(job, 1, StreamOptions()))({}, asyncio.Event().wait, send)
        await asyncio.to_thread(settle, service, 1.0)  # while the loop lives: a dead one would end them too

    asyncio.run(go())
    service.engine.close()


def test_a_bug_is_a_500_in_openai_shape_and_the_server_lives(monkeypatch, caplog):
    service = make_service()
    with serving(service) as url, httpx.Client(base_url=url) as client:
        with monkeypatch.context() as patch:
            patch.setattr(service.tokenizer, "encode", lambda *args, **kwargs: 1 / 0)
            response = client.post("/v1/completions", json=TEXT)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "division" not in response.text
        assert client.post("/v1/completions", json=TEXT).status_code == 200
    assert "ZeroDivisionError" in caplog.text
