"""The tracer: in goes a transformers config, out comes the model's fx graph over any number of tokens."""

import copy
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
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from planc.compiler import hooks
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
    config: PretrainedConfig, *, tokens: int = 9, prepare: Callable[[PreTrainedModel], None] | None = None
) -> Traced:
    """The graph of the config's causal language model in float32, over T tokens and R wanted rows.

    `prepare` gets the model on the meta device before it is traced: the place to untie parameters that the checkpoint
    holds apart. Raises PlancError when the model cannot be built or exported, naming the exception, the module path and
    the source line, and when the graph would hold for some token counts only.
    """
    with hooks.installed() as implementation:
        model = build(config, implementation)
        if prepare is not None:
            prepare(model)
        return capture(config.model_type, _Step(model), real_buffers(model), tokens)


def capture(name: str, step: nn.Module, buffers: Mapping[str, Tensor], tokens: int) -> Traced:
    """The graph of `step`, a function of (ids, positions, logit_rows) whose attribute `model` holds all parameters."""
    program = _functional(_export(step, tokens))
    _check_dynamic(program)
    return _traced(name, step.model, program, buffers)


def build(config: PretrainedConfig, attention: str, device: str = "meta") -> PreTrainedModel:
    """The model in float32 and eval mode; on "meta" nothing is allocated. PlancError when transformers refuses."""
    try:
        with torch.device(device):
            own = copy.deepcopy(config)  # the model writes into its config
            model = AutoModelForCausalLM.from_config(own, dtype=torch.float32, attn_implementation=attention)
    except KeyError as e:
        raise _no_hook(config) if e.args == (attention,) else _not_built(config, e) from e
    except Exception as e:  # whatever a model's constructor raises is the user's answer
        raise _not_built(config, e) from e
    accepted = inspect.signature(model.forward).parameters
    for name in ("position_ids", "logits_to_keep"):
        if name not in accepted:
            raise PlancError(f"{type(model).__name__}.forward takes no {name}; only models that do can be compiled yet")
    model = model.eval()
    assert isinstance(model, PreTrainedModel)
    return model


def _not_built(config: PretrainedConfig, error: Exception) -> PlancError:
    return PlancError(f"building the model of type {config.model_type!r}: {_one_line(error)}")


def _no_hook(config: PretrainedConfig) -> PlancError:
    return PlancError(
        f"the attention of model type {config.model_type!r} does not go through transformers' attention interface, "
        "so it cannot be captured yet"
    )


def real_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Values of the non-persistent buffers by name: no checkpoint holds them, so they are made again on the CPU.

    The nearest enclosing PreTrainedModel's `_init_weights` makes them, as `from_pretrained` has it do. Raises
    PlancError for a buffer that it leaves alone.
    """
    values: dict[str, Tensor] = {}
    _remake(model, "", model, values)
    return values


def _remake(module: nn.Module, path: str, owner: PreTrainedModel, values: dict[str, Tensor]) -> None:
    if isinstance(module, PreTrainedModel):
        owner = module
    missing = {n: b for n, b in module._buffers.items() if b is not None and n in module._non_persistent_buffers_set}
    if missing:
        for name, buffer in missing.items():
            module._buffers[name] = _unset(buffer)
        with torch.no_grad():
            owner._init_weights(module)
        for name, buffer in missing.items():
            made = module._buffers[name]
            if made is None or torch.equal(made, _unset(buffer)) or (made.is_floating_point() and made.isnan().any()):
                raise PlancError(f"buffer {path}.{name} is in no checkpoint and its module does not make it again")
            values[f"{path}.{name}"], module._buffers[name] = made, buffer
    for name, child in module.named_children():
        _remake(child, f"{path}.{name}" if path else name, owner, values)


def _unset(buffer: Tensor) -> Tensor:
    """A CPU tensor of the buffer's shape whose values no model would compute."""
    if buffer.dtype == torch.bool:
        return torch.zeros(buffer.shape, dtype=torch.bool)
    mark = float("nan") if buffer.is_floating_point() or buffer.is_complex() else -77
    return torch.full(buffer.shape, mark, dtype=buffer.dtype, device="cpu")


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
        return PlancError(f"the trace would hold for some token counts only: {violated[1][:300]}")
    paths = {id(m): n.removeprefix("model").lstrip(".") for n, m in step.named_modules()}
    where, line = "top level", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if id(owner) in paths and _is_model_code(frame):
            where, line = paths[id(owner)] or "top level", f"{_short(frame.f_code.co_filename)}:{number}"
    return PlancError(f"tracing stopped in {where} ({line}): {_one_line(error)}")


def _is_model_code(frame: FrameType) -> bool:
    return "/torch/" not in frame.f_code.co_filename and frame.f_globals.get("__name__") != __name__


def _short(filename: str) -> str:
    return filename.rpartition("site-packages/")[2]


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


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
            raise PlancError(f"the trace holds for {size} tokens only: the model computes with the size of {node.name}")
        bounds = program.range_constraints[size.node.expr]
        if bounds.lower > 2 or bounds.upper < 2**31:
            raise PlancError(f"the trace holds for {bounds.lower} to {bounds.upper} tokens only ({node.name})")
    for guard in getattr(program, "_guards_code", []):
        if set(guard.split(" == ")) != {"L['ids'].size()[1]", "L['positions'].size()[1]"}:
            raise PlancError(f"the trace holds only while {guard}, which a step of any size does not promise")


def _user_inputs(program: ExportedProgram) -> tuple[fx.Node, fx.Node, fx.Node]:
    names = program.graph_signature.user_inputs
    by_name = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    ids, positions, rows = (by_name[str(n)] for n in names)
    return ids, positions, rows


def _traced(name: str, model: nn.Module, program: ExportedProgram, values: Mapping[str, Tensor]) -> Traced:
    aliases = _aliases(model)
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
            parameters[spec.arg.name] = aliases.get(fqn, (fqn,))
    for out in program.graph_signature.output_specs:
        if out.kind is not OutputKind.USER_OUTPUT:
            raise PlancError(
                f"the model changes {out.target} while it runs; only models without such state are compiled"
            )
    ids, positions, rows = _user_inputs(program)
    names = {ids.name: "ids", positions.name: "positions", rows.name: "logit_rows"}
    symbols = {str(ids.meta["val"].shape[1]): "T", str(rows.meta["val"].shape[0]): "R"}
    return Traced(name, _live(program.graph), names, parameters, buffers, symbols, model)


def _constant(value: Any, name: str) -> Tensor:
    if not isinstance(value, Tensor) or value.device.type == "meta":
        raise PlancError(f"constant {name} of the trace has no value")
    return value


def _aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Every parameter's name, with the names of those tied to it, in the model's order."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return {name: tuple(names) for names in by_id.values() for name in names}


def _live(graph: fx.Graph) -> fx.Graph:
    """The graph without the nodes that the logits do not need: metadata assertions, the packed-sequence test."""
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
    return graph
