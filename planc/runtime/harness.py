"""`planc accuracy`: in go a plan and tasks; lm-evaluation-harness asks the served plan, and prints its table."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from planc.errors import PlancError, UsageError
from planc.plans import store
from planc.plans.schema import Plan
from planc.runtime.tokenizer import Tokenizer

NEEDS = ("lm_eval", "transformers", "aiohttp", "requests", "tenacity")  # what its local-completions model imports
SERVED = "planc"
READY = "serving on "  # the last line of planc run before it takes requests
MIN_LEN = 16  # tokens; below that hardly a question fits


@dataclass(frozen=True)
class HarnessOptions:
    """The flags of `planc accuracy`: tasks separated by commas, examples a task (a count, or a share below 1), examples
    shown before each question, prompts a request, a folder with more tasks, a folder for the results as JSON."""

    plan: Path
    tasks: str
    limit: float | None = None
    num_fewshot: int | None = None
    batch_size: int = 8
    apply_chat_template: bool = False
    include_path: Path | None = None
    output: Path | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if not self.tasks.strip(", "):
            raise UsageError("--tasks is empty; name tasks of lm-evaluation-harness, such as hellaswag,arc_easy.")
        for name in ("limit", "num_fewshot", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < (0 if name == "num_fewshot" else 1e-9):
                raise UsageError(f"--{name.replace('_', '-')} is {value}; pass a positive number.")


def evaluate(options: HarnessOptions) -> None:
    """Serves the plan for as long as the harness runs. PlancError when it is not installed or fails."""
    plan = store.load(options.plan)
    _check_installed()
    if plan.limits.max_model_len < MIN_LEN:
        raise PlancError(f"the plan serves {plan.limits.max_model_len} tokens; build with --max-model-len {MIN_LEN}.")
    with tempfile.TemporaryDirectory(prefix="planc-") as scratch, _served(options) as url:
        link = Path(scratch) / "tokenizer"  # a path without the commas that part the harness's arguments
        link.symlink_to((options.plan / "tokenizer").resolve())
        done = subprocess.run(command(options, plan, url, link), env=os.environ | {"TOKENIZERS_PARALLELISM": "false"})
    if done.returncode:
        raise PlancError(f"lm_eval ended with {done.returncode}; its own lines above say why.")


def command(options: HarnessOptions, plan: Plan, url: str, tokenizer: Path) -> list[str]:
    """The harness's command line for a server at `url`."""
    own = Tokenizer.load(options.plan / "tokenizer")
    opens = own.bos_token_id is not None and own.encode("a")[:1] == [own.bos_token_id]
    model = {
        "model": SERVED,
        "base_url": f"{url}/v1/completions",
        "tokenizer": tokenizer,
        "tokenizer_backend": "huggingface",
        "max_length": plan.limits.max_model_len,
        "add_bos_token": opens,  # as the server does with texts
        "max_retries": 1,
        "timeout": 3600,
    }
    flags = {
        "--tasks": options.tasks,
        "--limit": f"{options.limit:.12g}" if options.limit is not None else None,
        "--num_fewshot": options.num_fewshot,
        "--batch_size": options.batch_size,
        "--include_path": options.include_path,
        "--output_path": options.output,
    }
    args = ",".join(f"{name}={value}" for name, value in model.items())
    given = [text for name, value in flags.items() if value is not None for text in (name, str(value))]
    chat = ["--apply_chat_template"] if options.apply_chat_template else []
    return [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", args, *given, *chat]


def _check_installed() -> None:
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise PlancError(
            f"planc accuracy needs {', '.join(missing)}; install it with: pip install 'lm_eval[api]' transformers"
        )


@contextmanager
def _served(options: HarnessOptions) -> Iterator[str]:
    """A server of the plan in a process of its own, on a free port; gives its address."""
    flags = ["--port", "0", "--served-model-name", SERVED]
    flags += ["--threads", str(options.threads)] if options.threads else []
    server = subprocess.Popen(
        [sys.executable, "-m", "planc", "run", str(options.plan), *flags], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    try:
        ready = next((line for line in server.stdout if line.startswith(READY)), None)
        if ready is None:
            raise PlancError(f"{options.plan} could not be served: planc run ended with {server.wait()}.")
        yield ready.removeprefix(READY).strip()
    finally:
        server.terminate()
        server.wait(timeout=60)
        server.stdout.close()
