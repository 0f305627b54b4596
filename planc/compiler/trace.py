"""The tracer: in goes a transformers config, out comes the model's fx graph over any number of tokens."""

import inspect
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from transformers import PretrainedConfig, PreTrainedModel

from planc.compiler import hooks
from planc.compiler.refusal import refused, source_place
from planc.compiler.source.base import new_model, one_line
from planc.compiler.source.bind import tied_names
from planc.compiler.source.buffers import fresh_buffers
from planc.errors import PlancError

ROWS = 3  # rows of logits asked for while tracing; any number but 0, 1 and the token count


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
    torch's symbols to "T" and "R". `module` is the model on the meta device.
    """

    name: str
    graph: fx.Graph
    inputs: Mapping[str, str]
    parameters: Mapping[str, tuple[str, ...]]
    buffers: Mapping[str, Buffer]
    symbols: Mapping[str, str]
    module: nn.Module


class _Step(nn.Module):
    """The model as a function of (ids, positions, rows) alone; `model` is the prefix that every path of it carries."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        out = self.model(input_ids=ids, position_ids=positions, logits_to_keep=logit_rows, use_cache=False)
        logits: Tensor = out.logits
        return logits


def trace(
    config: PretrainedConfig,
    *,
    tokens: int = 9,
    prepare: Callable[[PreTrainedModel], None] | None = None,
    trust_remote_code: bool = False,
) -> Traced:
    """The graph of the config's causal language model in float32, over T tokens and R wanted rows.

    `prepare` gets the model on the meta device before it is traced: the place to untie parameters that the checkpoint
    holds apart. `trust_remote_code` lets a config build a model from its own code. Raises PlancError when the model
    cannot be built or exported, naming the exception, the module path and the source line, and when the graph would
    hold for some token counts only.
    """
    with hooks.installed() as implementation:
        model = new_model(config, trust_remote_code=trust_remote_code, attention=implementation)
        _check_forward(model)
        if prepare is not None:
            prepare(model)
        return capture(config.model_type, _Step(model), fresh_buffers(model, _unstored(model)), tokens)


def capture(name: str, step: nn.Module, buffers: Mapping[str, Tensor], tokens: int) -> Traced:
    """The graph of `step`, a function of (ids, positions, logit_rows) whose attribute `model` holds all parameters."""
    program = _functional(_export(step, tokens))
    _check_dynamic(program)
    return _traced(name, step.model, program, buffers)


def _unstored(model: nn.Module) -> set[str]:
    """Names of the buffers that no checkpoint holds."""
    return {name for name, _ in model.named_buffers(remove_duplicate=False)} - model.state_dict().keys()


def _check_forward(model: PreTrainedModel) -> None:
    """PlancError unless a packed step can say where its tokens stand and which logits it wants."""
    accepted, kind = inspect.signature(model.forward).parameters, type(model)
    for name in ("position_ids", "logits_to_keep"):
        if name not in accepted:
            raise refused(
                f"{kind.__name__} (model type {model.config.model_type}, module {kind.__module__}): its forward takes "
                f"no {name}, which planc needs to run tokens of several sequences in one step"
            )


def _export(step: nn.Module, tokens: int) -> ExportedProgram:
    ids = torch.zeros((1, tokens), dtype=torch.long, device="meta")
    rows = torch.zeros(ROWS, dtype=torch.long, device="meta")
    count = Dim("T", min=2)
    shapes = ({1: count}, {1: count}, {0: Dim.DYNAMIC})
    try:
        with torch.no_grad():
            return torch.export.export(step, (ids, ids.clone(), rows), dynamic_shapes=shapes, strict=False)
    except PlancError:
        raise
    except Exception as e:  # torch.export lets whatever the model's Python raised pass through
        raise _failure(e, step) from e


def _failure(error: Exception, step: nn.Module) -> PlancError:
    """The export's exception as one line: what, in which module, at which source line of the model."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, PlancError):
            return seen
        seen = seen.__cause__ or seen.__context__
    if violated := re.search(r"Constraints violated.*?\n\s*- (.*)", str(error)):
        return refused(f"the trace would hold for some token counts only: {violated[1][:300]}")
    paths = {id(m): n.removeprefix("model").lstrip(".") for n, m in step.named_modules()}
    where, line = "top level", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if id(owner) in paths and _is_model_code(frame):
            where, line = paths[id(owner)] or "top level", source_place(frame.f_code.co_filename, number)
    return refused(f"tracing stopped in {where} ({line}): {type(error).__name__}: {one_line(error)}")


def _is_model_code(frame: FrameType) -> bool:
    return "/torch/" not in frame.f_code.co_filename and frame.f_globals.get("__name__") != __name__


def _functional(program: ExportedProgram) -> ExportedProgram:
    """The program without in-place ops. Decomposing costs as much as the export, so only models that need it pay."""
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            return program.run_decompositions({})
    return program


def _check_dynamic(program: ExportedProgram) -> None:
    """PlancError unless the graph holds for every token count from 2 on."""
    ids, positions, rows = _user_inputs(program)
    for node, axis in ((ids, 1), (positions, 1), (rows, 0)):
        size = node.meta["val"].shape[axis]
        if not isinstance(size, torch.SymInt):
            raise refused(f"the trace holds for {size} tokens only: the model computes with the size of {node.name}")
        bounds = program.range_constraints[size.node.expr]
        if bounds.lower > 2 or bounds.upper < 2**31:
            raise refused(f"the trace holds for {bounds.lower} to {bounds.upper} tokens only ({node.name})")
    for guard in getattr(program, "_guards_code", []):
        if set(guard.split(" == ")) != {"L['ids'].size()[1]", "L['positions'].size()[1]"}:
            raise refused(f"the trace holds only while {guard}, which a step of any size does not promise")


def _user_inputs(program: ExportedProgram) -> tuple[fx.Node, fx.Node, fx.Node]:
    names = program.graph_signature.user_inputs
    by_name = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    ids, positions, rows = (by_name[str(n)] for n in names)
    return ids, positions, rows


def _traced(name: str, model: nn.Module, program: ExportedProgram, values: Mapping[str, Tensor]) -> Traced:
    aliases = tied_names(model)
    tied = _tied(aliases)
    parameters: dict[str, tuple[str, ...]] = {}
    buffers: dict[str, Buffer] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT or isinstance(spec.arg, ConstantArgument):
            continue
        assert isinstance(spec.arg, TensorArgument)
        assert spec.target is not None
        fqn = spec.target.removeprefix("model.")
        if spec.kind is InputKind.CONSTANT_TENSOR:
            buffers[spec.arg.name] = Buffer(fqn, _constant(program.constants[spec.target], fqn))
        elif spec.kind is InputKind.BUFFER and not spec.persistent:
            buffers[spec.arg.name] = Buffer(fqn, values[fqn])
        else:
            parameters[spec.arg.name] = tied.get(aliases.get(fqn, fqn), (fqn,))
    for out in program.graph_signature.output_specs:
        if out.kind is not OutputKind.USER_OUTPUT:
            raise refused(f"the model changes {out.target} while it runs; only models without such state are compiled")
    ids, positions, rows = _user_inputs(program)
    names = {ids.name: "ids", positions.name: "positions", rows.name: "logit_rows"}
    symbols = {str(ids.meta["val"].shape[1]): "T", str(rows.meta["val"].shape[0]): "R"}
    return Traced(name, _live(program.graph), names, parameters, buffers, symbols, model)


def _constant(value: Any, name: str) -> Tensor:
    if not isinstance(value, Tensor) or value.device.type == "meta":
        raise refused(f"constant {name} of the trace has no value")
    return value


def _tied(aliases: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The first name of each shared parameter, with all its names in the model's order."""
    groups: dict[str, tuple[str, ...]] = {}
    for further, first in aliases.items():
        groups[first] = (*groups.get(first, (first,)), further)
    return groups


def _live(graph: fx.Graph) -> fx.Graph:
    """The graph without the nodes that the logits do not need: metadata assertions, the packed-sequence test."""
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
    return graph
