"""The tracer: in goes a transformers config, out comes the model's fx graph over any number of tokens."""

import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from planc.compiler import hooks, loops, regime
from planc.compiler.anchor import anchored
from planc.compiler.functional import functionalize
from planc.compiler.refusal import refused, source_place
from planc.compiler.source.base import NoAttentionInterface, most_positions, new_model, one_line
from planc.compiler.source.bind import tied_names
from planc.compiler.source.buffers import fresh_buffers
from planc.compiler.traced import Buffer, Traced
from planc.errors import PlancError

_UNLIMITED = 4096  # positions of a model whose config names no limit
_COUNTS = (*range(2, 131), 255, 256, 257, 1000, 1024, 4095, 4096, 65537, 10**6)
_RECURRENT = "linear_attention"  # transformers' word for every kind of recurrent layer
ROWS = 3  # rows of logits asked for while tracing; any number but 0, 1 and the token count


class Step(nn.Module):
    """The model as a function of (ids, positions, rows) alone; `model` is the prefix that every path of it carries.

    A model that takes no positions numbers its tokens itself; one that cannot keep some rows only gives all of them.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        accepted = inspect.signature(model.forward).parameters
        self.positioned, self.keeps = "position_ids" in accepted, "logits_to_keep" in accepted

    def forward(self, ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        """Logits [1, R, vocab] of the wanted rows of ids [1, T] at positions [1, T]."""
        given: dict[str, Any] = {"position_ids": positions} if self.positioned else {}
        given |= {"logits_to_keep": logit_rows} if self.keeps else {}
        out = self.model(input_ids=ids, use_cache=False, **given)
        logits: Tensor = out.logits
        return logits if self.keeps else logits[:, logit_rows]


def trace(
    config: PretrainedConfig,
    *,
    tokens: int = 9,
    limit: int | None = None,
    prepare: Callable[[PreTrainedModel], None] | None = None,
    trust_remote_code: bool = False,
) -> Traced:
    """The graph of the config's causal language model in float32, over T tokens and R wanted rows.

    `limit` is the longest sequence that will be served, by default the config's: what depends on the length of a
    sequence is fixed there. `prepare` gets the model on the meta device before it is traced: the place to untie
    parameters that the checkpoint holds apart. `trust_remote_code` lets a config build a model from its own code.
    Raises PlancError when the model cannot be built or exported, naming the exception, the module path and the source
    line, and when the graph would hold for some token counts only.
    """
    limit = limit or most_positions(config) or _UNLIMITED
    hooked = _traced_by(config, hooks.NAME, tokens, limit, prepare, trust_remote_code)
    if hooked is not None:
        return hooked
    plain = _traced_by(config, "eager", tokens, limit, prepare, trust_remote_code)
    assert plain is not None
    return anchored(plain)


def _traced_by(
    config: PretrainedConfig,
    attention: str,
    tokens: int,
    limit: int,
    prepare: Callable[[PreTrainedModel], None] | None,
    trust_remote_code: bool,
) -> Traced | None:
    """The trace with an implementation of attention; None when the model does not go through the hooks."""
    with hooks.installed() as name:
        try:
            model = new_model(config, trust_remote_code=trust_remote_code, attention=attention)
        except NoAttentionInterface:
            return None
        if name == attention and not has_interface(model):
            return None
        if state := _recurrent_state(model):
            raise refused(
                f"{type(model).__name__} keeps a recurrent state beside keys and values ({state}); a plan has no place "
                "for one yet"
            )
        set_experts(model, name)
        if prepare is not None:
            prepare(model)
        buffers = fresh_buffers(model, _unstored(model))
        with regime.fixed(model, limit) as regimes, loops.unrolled(model):
            most = None if attention == name else limit - 1  # a mask in a buffer may end at the last position
            made = capture(config.model_type, Step(model), buffers, tokens, most)
        return replace(made, regimes=tuple(regimes), limit=limit)


def _recurrent_state(model: PreTrainedModel) -> str:
    """Who says that the model keeps a state from token to token; nothing when nobody does."""
    if getattr(model, "_is_stateful", False):
        return "so its code says"
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return f"its layers of type {_RECURRENT}" if _RECURRENT in kinds else ""


def has_interface(model: PreTrainedModel) -> bool:
    """Whether the model's code calls the attention that its config names, as transformers' own flag for it says."""
    return bool(model._supports_attention_backend) or _mentions_interface(type(model))


def _mentions_interface(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return hasattr(module, "ALL_ATTENTION_FUNCTIONS")


def set_experts(model: PreTrainedModel, name: str) -> None:
    """Has the model's expert layers go through the experts implementation `name`, where they can."""
    if any(isinstance(m, PreTrainedModel) and m._can_set_experts_implementation() for m in model.modules()):
        model.set_experts_implementation(name)


def capture(name: str, step: nn.Module, buffers: Mapping[str, Tensor], tokens: int, most: int | None = None) -> Traced:
    """The graph of `step`, a function of (ids, positions, logit_rows) whose attribute `model` holds all parameters.

    `most` bounds the tokens of a step while it is traced, for masks that lie in a buffer.
    """
    program = _functional(_export(step, tokens, most))
    _check_dynamic(program, most or 2**31)
    return _traced(name, step.model, program, buffers)


def _unstored(model: nn.Module) -> set[str]:
    """Names of the buffers that no checkpoint holds."""
    return {name for name, _ in model.named_buffers(remove_duplicate=False)} - model.state_dict().keys()


def _export(step: nn.Module, tokens: int, most: int | None) -> ExportedProgram:
    ids = torch.zeros((1, tokens), dtype=torch.long, device="meta")
    rows = torch.zeros(ROWS, dtype=torch.long, device="meta")
    count = Dim("T", min=2, max=most)
    shapes = ({1: count}, {1: count}, {0: Dim.DYNAMIC})

    def export(deferred: bool) -> ExportedProgram:
        with torch.no_grad(), _Literals():
            return torch.export.export(
                step,
                (ids, ids.clone(), rows),
                dynamic_shapes=shapes,
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=deferred,
            )

    try:
        return export(deferred=False)
    except PlancError:
        raise
    except Exception as e:  # torch.export lets whatever the model's Python raised pass through
        if "Constraints violated" not in str(e):
            raise _failure(e, step) from e
        try:  # a condition that torch cannot prove may be true all the same: it is then a node that can be looked at
            return _checked_asserts(export(deferred=True))
        except PlancError:
            raise
        except Exception:  # noqa: BLE001 - the first error says more
            raise _failure(e, step) from e


def _checked_asserts(program: ExportedProgram) -> ExportedProgram:
    """The program, when each condition on sizes that it asserts holds for small, odd, round and large token counts."""
    tokens = _user_inputs(program)[0].meta["val"].shape[1].node.expr
    for node in program.graph.nodes:
        if node.target is not torch.ops.aten._assert_scalar.default or not isinstance(node.args[0], fx.Node):
            continue
        condition = getattr(getattr(node.args[0].meta.get("val"), "node", None), "expr", True)
        wrong = [n for n in _COUNTS if not bool(getattr(condition, "subs", lambda _: True)({tokens: n}))]
        if wrong:
            raise refused(f"the trace would hold for some token counts only: not for {wrong[0]} tokens ({condition})")
    return program


class _Literals(TorchFunctionMode):
    """Numbers that the model's code turns into tensors on the device of its weights keep their value on meta."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and isinstance(args[0], (int, float)) and _on_meta(kwargs.get("device")):
            dtype = kwargs.get("dtype") or torch.tensor(args[0]).dtype
            return torch.full((), args[0], dtype=dtype, device="meta")
        if func is Tensor.__getitem__ and isinstance(args[1], tuple) and any(isinstance(i, list) for i in args[1]):
            args = (args[0], tuple(torch.tensor(i) if isinstance(i, list) else i for i in args[1]))
        return func(*args, **kwargs)


def _on_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


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
    """The program without in-place ops. torch's own way costs more than the export, and is left for what is unusual."""
    return program if functionalize(program) else program.run_decompositions({})


def _check_dynamic(program: ExportedProgram, most: int) -> None:
    """PlancError unless the graph holds for every token count from 2 to `most`."""
    ids, positions, rows = _user_inputs(program)
    for node, axis in ((ids, 1), (positions, 1), (rows, 0)):
        size = node.meta["val"].shape[axis]
        if not isinstance(size, torch.SymInt):
            raise refused(f"the trace holds for {size} tokens only: the model computes with the size of {node.name}")
        bounds = program.range_constraints[size.node.expr]
        if bounds.lower > 2 or bounds.upper < most:
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
