"""`planc run` from the outside: a process that loads a plan, serves, drains; and what it refuses before that."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from planc.errors import PlancError, UsageError
from planc.runtime.run import RunOptions, claim_port, load, run_prompt, serve
from planc.runtime.tokenizer import Tokenizer
from tests.runtime.cplan import MAX_LEN, MAX_SEQS, PLAN, expected, write_plan

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    root = tmp_path_factory.mktemp("plan")
    write_plan(root)
    return root


def start(plan, *flags):
    """The server as a process; returns it and its base URL once it says where it serves."""
    code = (
        "import sys, json; from pathlib import Path; from planc.runtime.run import RunOptions, serve;"
        "serve(RunOptions(Path(sys.argv[1]), port=0, **json.loads(sys.argv[2])), lambda line: print(line, flush=True))"
    )
    command = [sys.executable, "-c", code, str(plan), json.dumps(dict(flags))]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    loaded, serving = process.stdout.readline(), process.stdout.readline()
    assert "loaded in" in loaded
    return process, serving.split()[-1]


def post(url, body):
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    return urllib.request.urlopen(request, timeout=20)  # once: whoever reads the line of the address may connect


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_then_drains_at_a_signal(plan, number):
    process, url = start(plan, ("served_model_name", "mine"))
    body = {"prompt": [20, 21], "max_tokens": 100, "ignore_eos": True, "stream": True, "model": "mine"}
    response = post(url, body)
    first = response.readline()
    assert first.startswith(b"data: ")
    process.send_signal(number)
    lines = [line for line in response.read().splitlines() if line]
    assert lines[-1] == b"data: [DONE]"
    assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert process.wait(10) == 0
    assert process.stderr.read() == ""


def test_serving_imports_no_compiler_and_starts_fast(plan):
    """sys.modules after a served request holds nothing of the build's dependencies."""
    code = (
        "import sys; from pathlib import Path; from planc.runtime.run import RunOptions, run_prompt;"
        "import planc.runtime.server, planc.runtime.web;"
        "run_prompt(RunOptions(Path(sys.argv[1])), 'fox', 4, lambda text: None);"
        "heavy = ('torch', 'transformers', 'triton', 'onnx', 'safetensors', 'gguf', 'planc.compiler');"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(plan)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_prompt_goes_through_the_chat_template(plan):
    tokenizer = Tokenizer.load(plan / "tokenizer")
    ids = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": "fox"}]), add_special_tokens=False)
    written = []
    output = run_prompt(RunOptions(plan), "fox", 12, written.append)
    tokens = expected(ids, 12)
    tokens = tokens[: tokens.index(1)] if 1 in tokens else tokens
    assert "".join(written) == tokenizer.decode(tokens)
    assert output.finish_reason in ("length", "stop")


def test_prompt_too_long_is_one_line(plan):
    with pytest.raises(PlancError, match="in the prompt"):
        run_prompt(RunOptions(plan), "fox " * 500)


def test_kv_memory_and_limits(plan):
    loaded = load(RunOptions(plan, kv_cache_memory_bytes=10 * PLAN.kv.page_bytes, max_num_seqs=2))
    assert (loaded.engine.pool.num_blocks, loaded.engine.limits.max_num_seqs) == (10, 2)
    loaded.engine.close()
    loaded = load(RunOptions(plan))
    assert loaded.engine.pool.num_blocks == MAX_SEQS * MAX_LEN // PLAN.kv.block_size
    loaded.engine.close()


def test_small_cache_lowers_the_context_and_says_so(plan, caplog):
    loaded = load(RunOptions(plan, kv_cache_memory_bytes=3 * PLAN.kv.page_bytes))
    assert loaded.engine.limits.max_model_len == 48
    assert f"--kv-cache-memory-bytes {8 * PLAN.kv.page_bytes}" in caplog.text
    loaded.engine.close()


@pytest.mark.parametrize(
    ("flags", "error", "match"),
    [
        ({"max_num_seqs": 5}, PlancError, "--max-num-seqs 5 is above this plan's 4"),
        ({"max_num_batched_tokens": 33}, PlancError, "--max-num-batched-tokens 33 is above this plan's 32"),
        ({"max_num_seqs": 0}, UsageError, "--max-num-seqs is 0"),
        ({"max_num_batched_tokens": 3}, UsageError, "--max-num-batched-tokens 3 is less than --max-num-seqs 4"),
        ({"api_key": ""}, UsageError, "--api-key is empty"),
        ({"api_key": " key"}, UsageError, "--api-key"),
        ({"kv_cache_memory_bytes": 1}, PlancError, "needs at least"),
        ({"memory_utilization": 1.5}, UsageError, "--memory-utilization"),
        ({"port": 70000}, UsageError, "--port"),
        ({"threads": 0}, UsageError, "--threads"),
    ],
)
def test_refusals_name_the_flag(plan, flags, error, match):
    with pytest.raises(error, match=match):
        load(RunOptions(plan, **flags))


def test_a_step_may_hold_one_token_of_each_sequence(plan):
    loaded = load(RunOptions(plan, max_num_batched_tokens=3, max_num_seqs=3))
    assert loaded.engine.limits.max_num_batched_tokens == 3
    loaded.engine.close()


@pytest.mark.parametrize("name", ["/etc/passwd", "../weights.safetensors", "weights/../../w", ""])
def test_files_outside_the_plan_are_refused(tmp_path, name):
    write_plan(tmp_path, weight_files=(name,))
    with pytest.raises(PlancError, match="expected a relative path below the plan"):
        load(RunOptions(tmp_path))


def test_port_in_use_and_bad_host_are_known_before_loading(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PlancError, match=f"cannot listen on 127.0.0.1:{port}"):
            serve(RunOptions(tmp_path / "no-plan", port=port))
    with pytest.raises(PlancError, match="--host no-such-host"):
        claim_port("no-such-host.invalid", 0)


def test_the_address_is_announced_when_it_is_open(plan):
    """Whoever starts a server and waits for this line connects at once, and does not try again."""
    code = """
import socket, sys, signal
from pathlib import Path
from planc.runtime.run import RunOptions, serve
def echo(line):
    if line.startswith("serving on "):
        host, port = line.removeprefix("serving on http://").rsplit(":", 1)
        socket.create_connection((host, int(port)), timeout=5).close()
        print("connected", flush=True)
        raise KeyboardInterrupt
serve(RunOptions(Path(sys.argv[1]), port=0), echo)
"""
    done = subprocess.run([sys.executable, "-c", code, str(plan)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "connected\n", done.stderr


def test_port_is_closed_until_ready_and_sends_at_once():
    with claim_port("127.0.0.1", 0) as listener:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(listener.getsockname(), timeout=1)
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_reader_that_has_seen_enough_hears_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "planc", "targets"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
