"""Expert layers written as a loop over the experts that were hit: in goes such a module, out come sparse expert ops.

A loop over data cannot be traced. While a model is traced, the loop runs once for all experts that are alike: the
expert's number, its rows of the weights and its tokens are stand-ins, and what the body does with them is done for
every chosen expert of every token. Whether it was understood shows in the self-test, by numbers.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from planc.compiler.refusal import refused

_INDEX = (Tensor.__getitem__,)


@contextmanager
def unrolled(model: nn.Module) -> Iterator[None]:
    """While it lasts, modules of `model` that loop over experts run their body once for all that are alike."""
    found = [m for m in model.modules() if _loops(m)]
    for module in found:
        module.forward = _once(module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in found:
            del module.forward


def _loops(module: nn.Module) -> bool:
    """A module that takes chosen experts and has no implementation to choose, as those with the hook have."""
    names = inspect.signature(type(module).forward).parameters
    return {"top_k_index", "top_k_weights"} <= names.keys() and not hasattr(module, "is_transposed")


def _once(module: nn.Module) -> Callable[..., Tensor]:
    body = type(module).forward

    def run(expert: int, x: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, "_Loop"]:
        loop = _Loop(chosen, expert)
        with loop:
            out: Tensor = body(module, x, chosen, weights)
        if not loop.ran:
            raise refused(f"{type(module).__name__}: its loop over experts is not written in a way that is understood")
        return out, loop

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        given = hidden_states, top_k_index
        out, first = run(0, *given, top_k_weights)
        _, last = run(first.experts - 1, *given, top_k_weights)
        if first.stacks == last.stacks:
            return out
        low, high = 0, first.experts - 1  # the last experts are of another kind: where do they begin?
        while high - low > 1:
            middle = (low + high) // 2
            same = run(middle, *given, top_k_weights)[1].stacks == first.stacks
            low, high = (middle, high) if same else (low, middle)
        ours = (top_k_index < high).to(top_k_weights.dtype)
        return run(0, *given, top_k_weights * ours)[0] + run(high, *given, top_k_weights * (1 - ours))[0]

    return forward


class _Stand:
    """What stands for something of one expert; torch's functions hand it to the loop."""

    def __init__(self, loop: "_Loop") -> None:
        self.loop = loop

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stand = next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, _Stand))
        return stand.loop.run(func, args, kwargs or {})


class _Hits(_Stand):
    """The mask of chosen experts, its sums, and in the end the list of experts that were hit."""

    def permute(self, *_: int) -> "_Hits":
        return self

    def sum(self, **_: Any) -> "_Hits":
        return self

    def nonzero(self, **_: Any) -> list["_Expert"]:
        return [_Expert(self.loop)]

    def __getitem__(self, expert: Any) -> "_Row":
        return _Row(self.loop)


class _Row(_Stand):
    """The mask of one expert."""

    def squeeze(self, *_: int) -> "_Row":
        return self


class _Expert(_Stand):
    """The number of an expert, which stands for all of its class."""

    def __getitem__(self, _: Any) -> "_Expert":
        return self

    def item(self) -> int:
        return self.loop.expert


class _Tokens(_Stand):
    """The tokens of one expert: all, in each of their slots."""

    def numel(self) -> int:
        return 1


class _Slots(_Stand):
    """The slots of one expert's tokens."""


class _Weight(_Stand):
    """One expert's matrix out of a stack of them [experts, rows, columns]."""

    def __init__(self, loop: "_Loop", stack: Tensor, transposed: bool = False) -> None:
        super().__init__(loop)
        self.stack, self.transposed = stack, transposed

    @property
    def T(self) -> "_Weight":
        return _Weight(self.loop, self.stack, not self.transposed)


class _Loop(TorchFunctionMode):
    """Gives torch's functions their meaning for all experts at once: tokens [T, D] become [T, slots, D]."""

    def __init__(self, chosen: Tensor, expert: int) -> None:
        super().__init__()
        self.chosen, self.expert, self.experts, self.ran = chosen, expert, 0, False
        self.stacks: list[int] = []  # which weights the body used, in order

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The function on stand-ins, or as it is on anything else."""
        if func is torch._C._nn.one_hot and args[0] is self.chosen:
            self.experts = int(args[1] if len(args) > 1 else kwargs["num_classes"])
            return _Hits(self)
        if func in (torch.greater, torch.gt) and isinstance(args[0], _Hits):
            return args[0]
        if func is torch.where and isinstance(args[0], _Row):
            return _Slots(self), _Tokens(self)
        if func in _INDEX:
            return self._index(*args)
        if func is torch.nn.functional.linear and isinstance(args[1], _Weight):
            return self._product(args[0], args[1], not args[1].transposed, *args[2:], **kwargs)
        if func in (Tensor.matmul, torch.matmul, Tensor.__matmul__) and isinstance(args[1], _Weight):
            return self._product(args[0], args[1], args[1].transposed)
        if func in (Tensor.view, Tensor.reshape) and self._is_slotted(args[0]) and args[1] == -1 and len(args) == 3:
            return args[0]
        if func in (Tensor.index_add_, torch.index_add) and isinstance(args[2], _Tokens):
            self.ran = True
            return args[0].add_(args[3].sum(1))
        if any(isinstance(a, _Stand) for a in args):
            raise refused(f"a loop over experts calls {getattr(func, '__name__', func)}, which is not understood")
        return func(*args, **kwargs)

    def _index(self, x: Any, index: Any) -> Any:
        first = index[0] if isinstance(index, tuple) else index
        if isinstance(first, _Expert) or (
            isinstance(first, int) and first == self.expert and isinstance(x, nn.Parameter)
        ):
            return _Weight(self, x)
        if isinstance(first, _Tokens) and not isinstance(index, tuple):
            return x.unsqueeze(1).expand(x.shape[0], self.chosen.shape[1], x.shape[1])
        if isinstance(first, _Tokens) and isinstance(index[1], _Slots):
            return x.unsqueeze(-1) if index[2:] == (None,) else x
        return Tensor.__getitem__(x, index)

    def _product(self, x: Tensor, w: _Weight, straight: bool, bias: Any = None) -> Tensor:
        """x @ w.T when `straight`, x @ w otherwise, each token with the experts that it chose."""
        if bias is not None:
            raise refused("a loop over experts with a bias is not understood")
        self.stacks.append(id(w.stack))
        out: Tensor = torch.ops.planc.expert_linear(x, self.chosen, w.stack, None, not straight)
        return out

    def _is_slotted(self, x: Any) -> bool:
        if not isinstance(x, Tensor) or x.dim() != 3 or not isinstance(x.shape[1], int):
            return False  # the number of tokens must not be compared: it would be fixed
        return x.shape[1] == self.chosen.shape[1]
