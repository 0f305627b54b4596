"""Builds SmolLM2-135M-Instruct for this CPU, serves it, streams one chat answer, and prints the figures."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

PLAN = Path("demo-plan")
QUESTION = "What is the capital of France? Answer in one sentence, then name two things to see there."
PLANC = [sys.executable, "-m", "planc"]


def main() -> int:
    """Build, serve, ask, report, stop."""
    start = time.perf_counter()
    subprocess.run([*PLANC, "build", "--model", "smollm2-135m", "-o", str(PLAN), "--force"], check=True)
    build_seconds = time.perf_counter() - start
    port = free_port()
    start = time.perf_counter()
    server = subprocess.Popen([*PLANC, "run", str(PLAN), "--port", str(port)])
    try:
        wait_until_ready(server, port)
        load_seconds = time.perf_counter() - start
        ttft, rate, tokens = ask(port)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)
    print(
        f"\nbuild {build_seconds:.1f} s | load {load_seconds:.2f} s | TTFT {ttft * 1e3:.0f} ms | "
        f"{rate:.1f} tokens/s over {tokens} tokens"
    )
    return 0


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_until_ready(server: subprocess.Popen[bytes], port: int) -> None:
    """Returns when /health answers; raises when the server ends first."""
    while server.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=1).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.02)
    raise SystemExit(f"the server ended with {server.returncode}")


def ask(port: int) -> tuple[float, float, int]:
    """Streams one answer; returns TTFT in seconds, decode tokens/s and the number of tokens."""
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 96,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    print(f"\n> {QUESTION}\n")
    sent = time.perf_counter()
    first = last = sent
    tokens = 0
    with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=120) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    last = time.perf_counter()
                    first = last if first == sent else first
                    sys.stdout.write(text)
                    sys.stdout.flush()
    print()
    return first - sent, (tokens - 1) / max(last - first, 1e-9), tokens


if __name__ == "__main__":
    sys.exit(main())
