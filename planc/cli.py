"""The command line: in go verbs and flags, out come the floors below, imported only inside the verb that needs them."""

import functools
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

import planc
from planc.errors import PlancError

if TYPE_CHECKING:
    from planc.plans.schema import Plan

F = TypeVar("F", bound=Callable[..., Any])
PLAN = click.Path(path_type=Path)


class _Verbs(click.Group):
    """Shows a PlancError as one line with its exit code, and an interrupt as one word."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PlancError as e:
            click.echo(f"planc: error: {e}", err=True)
            ctx.exit(e.exit_code)
        except BrokenPipeError:
            raise  # of who reads our output and has seen enough, as head has: click ends without a word
        except OSError as e:
            click.echo(f"planc: error: {e.filename or 'a file'}: {e.strerror or e}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            click.echo("planc: interrupted", err=True)
            ctx.exit(130)
        except Exception as e:
            if isinstance(e, click.ClickException | click.exceptions.Exit | click.Abort) or os.environ.get(
                "PLANC_DEBUG"
            ):
                raise
            told = " ".join(f"{type(e).__name__}: {e}".split())[:300]
            click.echo(f"planc: error: {told} (a defect of planc; PLANC_DEBUG=1 shows where)", err=True)
            ctx.exit(1)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(planc.__version__, prog_name="planc")
def main() -> None:
    """Compile a Hugging Face language model ahead of time into a plan, and serve it."""


def _build_extra(verb: F) -> F:
    """Turns a missing dependency of the compiler into the command that installs it."""

    @functools.wraps(verb)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return verb(*args, **kwargs)
        except ModuleNotFoundError as e:
            if (e.name or "").startswith("planc"):
                raise
            raise PlancError(f"building needs {e.name}; install it with: pip install 'planc[build]'") from e

    return wrapped  # type: ignore[return-value]


def _gate_options(verb: F) -> F:
    """Gives a verb the options of what a measured plan may lose."""
    options = (
        click.option("--max-kl", type=float, help="Most mean KL to the reference, in nats. [default: the scheme's]"),
        click.option("--max-ppl-increase", metavar="P%", help="Most growth of perplexity. [default: the scheme's]"),
    )
    for option in reversed(options):
        verb = option(verb)
    return verb


def _end_as_an_interrupt_does() -> None:
    """A termination leaves nothing behind, as an interrupt does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _tell(out: Path, plan: "Plan") -> None:
    """What was made, and where."""
    from planc.plans.show import lines, outcome

    click.echo(f"{out}: {plan.model.name} {plan.options.dtype} for {plan.target}")
    click.echo("\n".join(lines(outcome(plan))))


@main.command()
@click.option("--model", required=True, help="Hugging Face folder or hub id, a .gguf file, or an alias (smollm2-135m).")
@click.option(
    "--dtype",
    metavar="NAME",
    default="auto",
    show_default=True,
    help="Storage of weights: bf16, f32, int8 (W8A8), int8-wo, fp8, fp8-block, int4 (W4A8), awq, "
    "int4-wo, these three with -g64 or -g32, too. "
    "auto: as the checkpoint is quantized, else bf16.",
)
@click.option("--quant-config", type=PLAN, metavar="FILE", help="JSON: default, lm_head, embedding, router, modules.")
@click.option(
    "--target",
    default="cpu",
    show_default=True,
    help="cpu (this machine's), cpu:<isa>, or GPUs of `planc targets`: several, with commas, give a plan each in -o.",
)
@click.option(
    "--tp",
    type=int,
    metavar="N",
    default=1,
    show_default=True,
    help="Processes that split each layer (tensor parallel).",
)
@click.option("--max-model-len", type=int, help="Tokens of one sequence. [default: the model's]")
@click.option("--max-num-seqs", type=int, default=64, show_default=True, help="Sequences in one step.")
@click.option("--max-num-batched-tokens", type=int, default=2048, show_default=True, help="Tokens in one step.")
@click.option("--block-size", type=int, default=16, show_default=True, help="Tokens in a block of the KV cache.")
@click.option(
    "--kv-cache-dtype",
    type=click.Choice(["auto", "f32", "bf16", "fp8", "int8"]),
    default="auto",
    show_default=True,
    help="Elements of the KV cache; fp8 and int8 have a scale a token and head. auto: f32 for f32 weights, else bf16.",
)
@click.option(
    "--weights",
    type=click.Choice(["pack", "none"]),
    default="pack",
    show_default=True,
    help="none builds the code alone; `planc pack` adds weights later.",
)
@click.option(
    "--reference",
    type=click.Choice(["transformers", "none"]),
    default="transformers",
    show_default=True,
    help="What judges the plan; none skips it, and the manifest says so.",
)
@click.option(
    "--calib",
    metavar="FILE|builtin|none",
    default="builtin",
    show_default=True,
    help="Text or jsonl that schemes are calibrated with which profit from it (awq, int4, int8, fp8).",
)
@click.option("--calib-tokens", type=int, default=8192, show_default=True, help="Tokens of it that are run, at most.")
@_gate_options
@click.option(
    "--auto-mixed", is_flag=True, help="Where that is exceeded, store the worst modules wider until it is not."
)
@click.option("--tuning", type=PLAN, metavar="FILE", help="How to cut products, as `planc tune` measured.")
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Recorded in the plan; for steps that draw random numbers, which no step of today does.",
)
@click.option("--revision", help="Branch, tag or commit of a hub id.")
@click.option("--allow-pickle", is_flag=True, help="Read pickled weights (weights_only) where there are no others.")
@click.option("--trust-remote-code", is_flag=True, help="Run the model folder's own Python, in the build only.")
@click.option("-o", "--output", "out", type=click.Path(path_type=Path), default=Path("plan"), show_default=True)
@click.option("--force", is_flag=True, help="Replace a plan that exists.")
@click.option("--dump-dir", type=click.Path(path_type=Path), help="Write the graph after each pass there.")
@_build_extra
def build(**flags: Any) -> None:
    """Compile a model into a plan."""
    from planc.compiler.build import BuildRequest, build_each
    from planc.compiler.progress import Progress

    _end_as_an_interrupt_does()
    with Progress() as progress:
        made = build_each(BuildRequest(**flags), progress)
    for out, plan in made.items():
        _tell(out, plan)


@main.command()
@click.argument("plan", type=PLAN)
@click.option("--model", required=True, help="Whose weights: as `planc build` takes it, with the plan's config.")
@click.option("-o", "--output", "out", type=click.Path(path_type=Path), help="Where to write. [default: PLAN itself]")
@click.option(
    "--reference",
    type=click.Choice(["transformers", "none"]),
    default="transformers",
    show_default=True,
    help="What judges the plan; none skips it, and of a GPU's plan the goldens too.",
)
@_gate_options
@click.option("--revision", help="Branch, tag or commit of a hub id.")
@click.option("--allow-pickle", is_flag=True, help="Read pickled weights (weights_only) where there are no others.")
@click.option("--trust-remote-code", is_flag=True, help="Run the model folder's own Python.")
@click.option("--force", is_flag=True, help="Replace a plan that exists at -o.")
@_build_extra
def pack(**flags: Any) -> None:
    """Add a model's weights to a plan that was built with --weights none, without a rebuild."""
    from planc.compiler.pack import PackRequest
    from planc.compiler.pack import pack as add_weights
    from planc.compiler.progress import Progress

    _end_as_an_interrupt_does()
    request = PackRequest(**flags)
    with Progress() as progress:
        plan = add_weights(request, progress)
    _tell(request.out or request.plan, plan)


@main.command()
@click.option("--arch", multiple=True, help="A causal-LM type of transformers; may be repeated. [default: all]")
@click.option("--jobs", type=int, help="Types at a time. [default: the cores that this process may use]")
@click.option("--shard", metavar="I/N", help="Check the I-th of N parts of the list, counted from 1.")
@click.option("--limit", type=float, default=300.0, show_default=True, help="Seconds that one type may take.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--markdown", type=click.Path(path_type=Path), help="Write the table there, as docs/coverage.md is.")
@_build_extra
def coverage(**flags: Any) -> None:
    """Compile a small model of every type that transformers knows and compare; exit 1 when one is wrong."""
    from planc.compiler.coverage.command import CoverageRequest
    from planc.compiler.coverage.command import coverage as all_right

    sys.exit(0 if all_right(CoverageRequest(**flags)) else 1)


@main.command()
@click.argument("plan", type=PLAN)
@click.option("--graph", is_flag=True, help="Print the graph, equal layers folded.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest.")
def inspect(plan: Path, graph: bool, as_json: bool) -> None:
    """Show what a plan is: model, limits, memory by part, kernels, accuracy, goldens."""
    from planc.plans import show, store

    loaded = store.load(plan)
    if as_json:
        click.echo((plan / store.MANIFEST).read_text(), nl=False)
    elif graph:
        click.echo(show.fold_layers(_read_graph(plan / store.GRAPH)), nl=False)
    else:
        for title, rows in show.summary(loaded).items():
            click.echo("\n".join([title, *show.lines(rows)]))


def _read_graph(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        raise PlancError(f"{path} is missing; build the plan again.") from None


@main.command()
@click.argument("plan", type=PLAN)
@click.option("--json", "as_json", is_flag=True)
def check(plan: Path, as_json: bool) -> None:
    """Check a plan's files, schema, target and memory on this machine; exit 1 naming what fails."""
    from planc.plans.check import check as findings_of

    findings = findings_of(plan)
    if as_json:
        click.echo(json.dumps([vars(f) for f in findings], indent=1))
    else:
        for f in findings:
            click.echo(f"{'ok  ' if f.ok else 'FAIL'} {f.name}: {f.detail}")
    sys.exit(0 if all(f.ok for f in findings) else 1)


@main.command()
@click.argument("plan", type=PLAN)
@click.option("--onnx", type=PLAN, metavar="FILE", required=True, help="Where to write; FILE.data too beyond 2 GB.")
@click.option("--force", is_flag=True, help="Replace FILE and FILE.data.")
@_build_extra
def export(**flags: Any) -> None:
    """Write a plan's graph and weights as ONNX: one prefill, for onnxruntime and Netron."""
    from planc.compiler.onnx_export.command import ExportRequest
    from planc.compiler.onnx_export.command import export as write_onnx
    from planc.compiler.progress import Progress
    from planc.plans.show import mib

    _end_as_an_interrupt_does()
    request = ExportRequest(**flags)
    with Progress() as progress:
        made = write_onnx(request, progress)
    where = f" in {made.data.name}" if made.data else ""
    name, dtype = made.plan.model.name, made.plan.options.dtype
    click.echo(f"{request.onnx}: {name} {dtype}, {made.nodes:,} nodes, weights {mib(made.weight_bytes)}{where}")


@main.command()
@click.argument("plan", type=PLAN)
@click.option("--threads", type=int, help="Threads of a step. [default: the cores that this process may use]")
@click.option("--emulate", is_flag=True, help="Run the kernels of a GPU's plan on this CPU, against references.")
@click.option("--kernels", is_flag=True, help="With --emulate: each kernel by itself, also of a small model.")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="With --emulate: of inputs and orders of launches."
)
def verify(plan: Path, threads: int | None, emulate: bool, kernels: bool, seed: int) -> None:
    """Run a plan's goldens; exit 1 when its tokens are not those of the manifest.

    With --emulate: run the kernels of a GPU's plan without that GPU, a small model's whole, and exit 1 when one is
    wrong.
    """
    if emulate:
        sys.exit(0 if _emulated(plan, seed, kernels) else 1)
    from planc.plans import store
    from planc.runtime.executors import open_executor
    from planc.runtime.goldens import verify as verdicts_of

    loaded = store.load(plan)
    longest = max((len(g.prompt_ids) + len(g.tokens) for g in loaded.goldens), default=0)
    if not longest:
        raise PlancError(f"{plan} has no goldens: it was built with --weights none, or packed with --reference none.")
    blocks = -(-longest // loaded.kv.block_size)
    executor = open_executor(plan, loaded, num_blocks=blocks, num_threads=threads)
    try:
        results = list(verdicts_of(loaded, executor))
    finally:
        executor.close()
    for v in results:
        told = "equal" if v.differs_at is None else f"differs at token {v.differs_at}" + (" (a tie)" if v.tied else "")
        click.echo(f"{'ok  ' if v.ok else 'FAIL'} {v.golden.prompt!r}: {told}")
    sys.exit(0 if all(v.ok for v in results) else 1)


@_build_extra
def _emulated(plan: Path, seed: int, kernels: bool) -> bool:
    from planc.compiler.emulate import Verdict
    from planc.compiler.emulate import verify as run_emulated

    def report(verdict: Verdict) -> None:
        click.echo(f"{'ok  ' if verdict.ok else 'FAIL'} {verdict.name}: {verdict.detail}")

    return run_emulated(plan, report, seed, kernels)


@main.command()
@click.argument("plan", type=PLAN)
@click.option("--batch", type=int, multiple=True, metavar="N", help="Sequences of a decode step; may be repeated.")
@click.option("--input-len", type=int, help="Tokens of a prompt, and before a decode step; 512 if the plan has them.")
@click.option("--output-len", type=int, help="Decode steps of each batch; 32 if the plan has them.")
@click.option("--threads", type=int, help="Threads; by default the cores that this process may use.")
@click.option("--json", "as_json", is_flag=True)
@_build_extra
def bench(
    plan: Path,
    batch: tuple[int, ...],
    input_len: int | None,
    output_len: int | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Measure a plan here: prefill and decode rates, and each kernel's time and share of the machine's limits."""
    from planc.compiler.bench import Request, lines
    from planc.compiler.bench import bench as measured

    request = Request(batch, input_len, output_len, threads)
    report = measured(plan, request, lambda line: click.echo(line, err=True))
    click.echo(json.dumps(report.data(), indent=1) if as_json else "\n".join(lines(report)))


@main.command()
@click.argument("plan", type=PLAN)
@click.option("--seconds", type=float, default=60.0, show_default=True, help="Time to take; what is measured is kept.")
@click.option(
    "-o",
    "--output",
    "out",
    type=PLAN,
    default=Path("tuning.json"),
    show_default=True,
    help="The file; what it says of other products and targets stays.",
)
@click.option("--best", type=int, help="Of a GPU: tiles to run of each product, beside the plan's. [default: 4]")
@click.option("--device", type=int, help="The GPU's number. [default: 0]")
@click.option("--threads", type=int, help="Of a CPU: threads. [default: the cores that this process may use]")
@_build_extra
def tune(**flags: Any) -> None:
    """Measure how to cut a plan's products on this machine's CPU or GPU, for `planc build --tuning`."""
    from planc.compiler.progress import Progress
    from planc.compiler.tune import tune as measure
    from planc.compiler.tune_request import TuneRequest

    _end_as_an_interrupt_does()
    request = TuneRequest(**flags)
    with Progress() as progress:
        made = measure(request, progress)
    click.echo(f"{request.out}: {len(made)} products measured")


@main.command()
@click.argument("plan", type=PLAN)
@click.option("--tasks", required=True, help="Tasks of lm-evaluation-harness, separated by commas.")
@click.option("--limit", type=float, help="Examples of each task: a count, or a share below 1. [default: all]")
@click.option("--num-fewshot", type=int, help="Examples shown before each question. [default: the task's]")
@click.option("--batch-size", type=int, default=8, show_default=True, help="Prompts in one request.")
@click.option("--apply-chat-template", is_flag=True, help="Ask as a user's turn of a conversation.")
@click.option("--include-path", type=click.Path(path_type=Path), help="A folder with more tasks.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the harness's results there, as JSON.")
@click.option("--threads", type=int, help="Threads of a step. [default: the cores that this process may use]")
def accuracy(**flags: Any) -> None:
    """Serve a plan to lm-evaluation-harness and print its scores."""
    from planc.runtime.harness import HarnessOptions, evaluate

    evaluate(HarnessOptions(**flags))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Every figure, with its source.")
def targets(as_json: bool) -> None:
    """List what --target takes: GPUs with their figures and what plans for them may store."""
    from planc.codegen import list_targets

    click.echo(json.dumps(list_targets.as_data(), indent=1) if as_json else "\n".join(list_targets.as_text()))


@main.command()
@click.argument("a", type=PLAN)
@click.argument("b", type=PLAN)
def diff(a: Path, b: Path) -> None:
    """Compare two plans; exit 0 when identical, 1 when not."""
    from planc.plans.diff import diff as differences

    found = differences(a, b)
    click.echo("\n".join(found) if found else "identical")
    sys.exit(1 if found else 0)


@main.command()
@click.argument("plan", type=PLAN)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=int, default=8000, show_default=True)
@click.option("--api-key", envvar="PLANC_API_KEY", help="Key that requests must carry; /health stays open.")
@click.option("--served-model-name", help="Name in the API. [default: the model's]")
@click.option("--max-num-seqs", type=int, help="Sequences in one step. [default: the plan's]")
@click.option("--max-num-batched-tokens", type=int, help="Tokens in one step. [default: the plan's]")
@click.option("--kv-cache-memory-bytes", type=int, help="Size of the KV cache; goes before --memory-utilization.")
@click.option(
    "--memory-utilization",
    type=float,
    default=0.9,
    show_default=True,
    help="Share of the available memory that weights, activations and KV cache may take.",
)
@click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=True, show_default=True)
@click.option("--threads", type=int, help="Threads of a step. [default: the cores that this process may use]")
@click.option(
    "--shutdown-timeout",
    type=int,
    default=45,
    show_default=True,
    help="Seconds that running requests get to end after SIGTERM.",
)
@click.option("--seed", type=int, help="Of the seeds drawn for requests that bring none.")
@click.option("--prompt", help="Print the answer to this prompt and leave, without a server.")
@click.option("--max-tokens", type=int, help="With --prompt: the most tokens to generate.")
def run(prompt: str | None, max_tokens: int | None, **flags: Any) -> None:
    """Serve a plan over an OpenAI-compatible API, or answer one prompt."""
    from planc.runtime.run import RunOptions, run_prompt, serve

    if max_tokens is not None and prompt is None:
        raise click.UsageError("--max-tokens goes with --prompt")
    options = RunOptions(**flags)
    if prompt is not None and not _is_text(prompt):
        raise click.UsageError("--prompt is not valid UTF-8")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may hold what the terminal's encoding does not
    if prompt is None:
        serve(options, click.echo)
    else:
        run_prompt(options, prompt, max_tokens)
        click.echo()


def _is_text(value: str) -> bool:
    """False for a command-line word that was no UTF-8: Python keeps its bytes as lone surrogates."""
    return not any("\ud800" <= c <= "\udfff" for c in value)
