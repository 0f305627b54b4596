"""Small functions of hidden states lifted alone: in goes a torch body, out come the graph's result and torch's."""

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from planc.compiler.ir import interp
from planc.compiler.ir.graph import Graph
from planc.compiler.ir.recipe import Recipe, load
from planc.compiler.ir.verify import verify
from planc.compiler.lift import lift
from planc.compiler.trace import capture
from planc.compiler.traced import Traced

WIDTH = 24
VOCAB = 40
TOKENS = 13

Body = Callable[[nn.Module, Tensor, Tensor], Tensor]


class _Parts(nn.Module):
    """Parameters and a buffer for bodies to use; all random, none trivial."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = {
            "table": (VOCAB, WIDTH),
            "w": (10, WIDTH),
            "wt": (WIDTH, 10),
            "v": (WIDTH,),
            "v10": (10,),
            "h": (4, 6),
            "heads": (4, 6, 5),
            "experts": (3, 10, WIDTH),
            "across": (3, WIDTH, 10),
            "biases": (3, 10),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.register_buffer("freq", torch.linspace(0.01, 1.0, 6), persistent=False)
        self.register_buffer("bf16", torch.linspace(-1, 1, WIDTH).bfloat16(), persistent=False)
        self.register_buffer("number", torch.tensor(1.7), persistent=False)
        self.register_buffer("places", torch.tensor([7, 0, -1, 3]), persistent=False)
        self.register_buffer("turns", torch.polar(torch.ones(6), torch.linspace(0.1, 2.0, 6)), persistent=False)


class _Step(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.model, self.body = _Parts(), body

    def forward(self, ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        hidden = nn.functional.embedding(ids, self.model.table)
        out = self.body(self.model, hidden, positions)
        return out[:, logit_rows]


def recipes(model: nn.Module, dtype: str = "f32", prefix: str = "") -> dict[str, Recipe]:
    """Every parameter as a checkpoint holds it that uses the model's own names."""
    return {name: load(prefix + name, dtype, tuple(p.shape)) for name, p in model.state_dict().items()}


@cache
def traced(body: Body) -> Traced:
    """The trace of a body (model, hidden [1, T, 24], positions [1, T]) -> [1, T, N]."""
    step = _Step(body)
    buffers = {name: b.clone() for name, b in step.model.named_buffers()}
    step = step.to("meta")
    with torch.no_grad():
        return capture("body", step, buffers, tokens=9)


@cache
def lifted(body: Body) -> Graph:
    """The graph of a body, verified, in a text form that reads back."""
    trace = traced(body)
    made = lift(trace, recipes(trace.module))
    verify(made, "lift")
    return made


def both(body: Body) -> tuple[Graph, np.ndarray, np.ndarray]:
    """The lifted graph, its result, and torch's, on a few rows at irregular positions."""
    made = lifted(body)
    with torch.no_grad():
        theirs = _Step(body)(*_inputs())[0].numpy()
    return made, result(made), theirs


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    """ids, positions and rows."""
    ids = torch.randint(0, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[0, 1, 2, 4, 5, 9, 11, 12, 13, 20, 21, 30, 31]])
    return ids, positions, torch.tensor([12, 0, 5, 5])


def result(made: Graph) -> np.ndarray:
    """What the graph of a body gives, or one that passes made of it, where `both` asks."""
    return run(made, dict(_Parts().named_parameters()), *_inputs())


def run(made: Graph, parameters: Mapping[str, Tensor], ids: Tensor, positions: Tensor, rows: Tensor) -> np.ndarray:
    """The interpreter's logits [R, N]; ids and positions are [1, T]."""
    weights = interp.weights_of(made, lambda name: parameters[name].detach().numpy(), made.constants)
    given = {"ids": ids[0], "positions": positions[0], "logit_rows": rows}
    inputs = {name: t.numpy().astype(np.int32) for name, t in given.items()}
    return interp.run(made, inputs, weights)["logits"]
