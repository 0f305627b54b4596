"""Dataclasses to JSON and back: in goes a frozen dataclass, out come plain values; what does not fit is refused."""

import dataclasses
import json
import types
import typing
from typing import Any, TypeVar, Union

T = TypeVar("T")


def to_json(obj: Any) -> str:
    """Canonical JSON: keys in field order, floats by repr, a newline at the end; equal data gives equal bytes."""
    return dumps(dataclasses.asdict(obj))


def dumps(data: Any) -> str:
    """Plain values as JSON, in the one form that `to_json` has."""
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def decode(cls: type[T], data: Any, where: str = "plan") -> T:
    """An instance of `cls` from parsed JSON; ValueError names the path of the first field that does not fit."""
    return typing.cast(T, _decode(cls, data, where))


def _decode(kind: Any, data: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, data, where)
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        return _optional(kind, data, where)
    if origin is tuple:
        _want(isinstance(data, list), where, "a list", data)
        return tuple(_decode(typing.get_args(kind)[0], d, f"{where}[{i}]") for i, d in enumerate(data))
    if origin is dict:
        _want(isinstance(data, dict), where, "an object", data)
        return {str(k): _decode(typing.get_args(kind)[1], v, f"{where}.{k}") for k, v in data.items()}
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    _want(type(data) is kind, where, f"a value of type {kind.__name__}", data)
    return data


def _optional(kind: Any, data: Any, where: str) -> Any:
    if data is None:
        return None
    (inner,) = (a for a in typing.get_args(kind) if a is not type(None))
    return _decode(inner, data, where)


def _dataclass(kind: Any, data: Any, where: str) -> Any:
    _want(isinstance(data, dict), where, "an object", data)
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key in data:
        if key not in fields:
            raise ValueError(f"{where}.{key} is not a field of the schema")
    values = {}
    for name, f in fields.items():
        if name in data:
            values[name] = _decode(hints[name], data[name], f"{where}.{name}")
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where}.{name} is missing")
    return kind(**values)


def _want(ok: bool, where: str, expected: str, got: Any) -> None:
    if not ok:
        raise ValueError(f"{where} should be {expected}, got {json.dumps(got)[:60]}")
