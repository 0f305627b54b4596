"""What a trace is: the fx graph of a model's step with its leaves named, and where each node came from."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from planc.compiler.refusal import source_place


@dataclass(frozen=True)
class Buffer:
    """A tensor that no checkpoint holds: its name in the model, and its value on the CPU."""

    name: str
    value: Tensor


@dataclass(frozen=True)
class Traced:
    """A traced model. `graph` is functional and holds live nodes only; its placeholders are named by the four maps.

    `inputs` maps placeholders to "ids" [1, T], "positions" [1, T] and "logit_rows" [R]; `parameters` maps them to the
    parameter's names, tied ones together, persistent buffers included; `buffers` maps them to values; `symbols` maps
    torch's symbols to "T" and "R". `module` is the model on the meta device. `regimes` are the paths of modules that
    answer as in a sequence of the longest length, `limit`.
    """

    name: str
    graph: fx.Graph
    inputs: Mapping[str, str]
    parameters: Mapping[str, tuple[str, ...]]
    buffers: Mapping[str, Buffer]
    symbols: Mapping[str, str]
    module: nn.Module
    regimes: tuple[str, ...] = ()
    limit: int = 4096

    @property
    def numbers_tokens(self) -> bool:
        """Whether the model counts its tokens itself, besides or in place of the positions that it is given."""
        counted = {torch.ops.aten.arange.default, torch.ops.aten.arange.start, torch.ops.aten.cumsum.default}
        live = (n for n in self.graph.nodes if n.target in counted and n.users)
        return any(isinstance(n.meta["val"].shape[-1], torch.SymInt) for n in live)


def target_name(node: fx.Node) -> str:
    """The op's name as torch prints it."""
    return str(node.target) if isinstance(node.target, torch._ops.OpOverload) else getattr(node.target, "__name__", "?")


def module_path(node: fx.Node) -> str:
    """Path of the innermost module, without the tracer's own prefix."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return str(path).removeprefix("model").lstrip(".")


def source_line(node: fx.Node) -> str:
    """file:line of the model's code that made the node."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    if not frames:
        return "no source line"
    own = [f for f in frames if "/torch/" not in f[0]] or frames
    return source_place(*own[-1])
