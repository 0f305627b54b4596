"""Conversions of types, and registers in halves of wider ones: in goes an instruction, out come its lines."""

from __future__ import annotations

from collections.abc import Callable

from planc.emulator.emit import BYTES, KIND, UNSIGNED, Code, Refused, is_float
from planc.emulator.ptx import Instruction, Operand, Vec

_INTEGRAL = {"rni": "np.rint", "rzi": "np.trunc", "rmi": "np.floor", "rpi": "np.ceil"}
_BYTE_PAIRS = ("e4m3x2", "e5m2x2")
_KNOWN = {"rn", "rz", "rna", "ftz", "sat", "satfinite", "relu", *_INTEGRAL, "tf32", *_BYTE_PAIRS}


def _cvt(code: Code, ins: Instruction) -> None:
    for part in ins.parts[1:]:
        if part not in _KNOWN and part not in KIND:
            raise Refused(f".{part}")
    types = [p for p in ins.parts[1:] if p in KIND or p in _BYTE_PAIRS or p == "tf32"]
    if len(types) != 2:
        raise Refused(f"types {types}")
    target, source = types
    if target.endswith("x2") or source.endswith("x2"):
        _packed(code, ins, target, source)
    elif target == "tf32":
        bits = code.read(ins.operands[1], "u32")
        code.write(
            ins.operands[0], f"({bits} + {code.constant(0x1000, 'u32')}) & ~{code.constant(0x1FFF, 'u32')}", "u32"
        )
    elif is_float(target):
        _to_float(code, ins, target, source)
    else:
        _to_int(code, ins, target, source)


def _packed(code: Code, ins: Instruction, target: str, source: str) -> None:
    out = ins.operands[0]
    if source == "f32":  # the first source is the high half
        high, low = (code.float(o, "f32") for o in ins.operands[1:3])
        values = f"bits.pair({low}, {high})"
    else:
        kind = "u16" if source in _BYTE_PAIRS else KIND[source]
        values = f"floats.unpack({code.read(ins.operands[1], kind)}, {source[:-2]!r})"
    if "relu" in ins.parts:
        values = f"np.maximum({values}, 0)"
    options = ", finite=True" if "satfinite" in ins.parts else ""
    options += ", down=True" if "rz" in ins.parts and target == "bf16x2" else ""
    kind = "u16" if target in _BYTE_PAIRS else KIND[target]
    code.write(out, f"floats.pack({values}, {target[:-2]!r}{options})", kind)


def _to_float(code: Code, ins: Instruction, target: str, source: str) -> None:
    value = code.float(ins.operands[1], source) if is_float(source) else code.read(ins.operands[1], KIND[source])
    if not is_float(source):
        value = f"{value}.astype({'f64' if target == 'f64' else 'f32'})"
    rounding = next((p for p in ins.parts if p in _INTEGRAL), None)
    if rounding:
        value = f"{_INTEGRAL[rounding]}({value})"
    if "relu" in ins.parts:
        value = f"np.maximum({value}, 0)"
    if "sat" in ins.parts:
        value = f"np.clip({value}, 0, 1)"
    if target in ("f32", "f64"):
        return code.write(ins.operands[0], f"({value}).astype({target})", target)
    if "rz" in ins.parts:
        return code.write(ins.operands[0], f"floats.narrow({value}, {target!r}, down=True)", "u16")
    code.write(ins.operands[0], f"floats.narrow({value}, {target!r})", "u16")


def _to_int(code: Code, ins: Instruction, target: str, source: str) -> None:
    kind = KIND[target]
    if is_float(source):
        rounding = next((p for p in ins.parts if p in _INTEGRAL), None)
        if rounding is None:
            raise Refused("no rounding")
        value = code.float(ins.operands[1], source)
        return code.write(ins.operands[0], f"bits.to_int({_INTEGRAL[rounding]}({value}.astype(f64)), {kind})", kind)
    value = code.read(ins.operands[1], KIND[source])
    if "sat" in ins.parts:
        value = f"bits.clipped({value}, {kind})"
    code.write(ins.operands[0], f"{value}.astype({kind})", kind)


def split(code: Code, out: Vec, source: Operand, ptx: str) -> None:
    """mov.b32 {low, high}, r"""
    kind = KIND[ptx]
    width = BYTES[kind] // len(out.items)
    value, part = code.read(source, kind), UNSIGNED[width]
    for index, item in enumerate(out.items):
        shifted = f"({value} >> {code.constant(8 * width * index, kind)})" if index else value
        code.write(item, f"{shifted}.astype({part})", part)


def joined(code: Code, out: Operand, source: Vec, ptx: str) -> None:
    """mov.b32 r, {low, high}"""
    kind = KIND[ptx]
    width = BYTES[kind] // len(source.items)
    terms = []
    for index, item in enumerate(source.items):
        wide = f"{code.read(item, UNSIGNED[width])}.astype({kind})"
        terms.append(f"({wide} << {code.constant(8 * width * index, kind)})" if index else wide)
    code.write(out, " | ".join(terms), kind)


RULES: dict[str, Callable[[Code, Instruction], None]] = {"cvt": _cvt}
