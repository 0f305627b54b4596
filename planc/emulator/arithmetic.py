"""Arithmetic, logic, comparison and selection: in goes an instruction, out come lines that compute it."""

from __future__ import annotations

from collections.abc import Callable

from planc.emulator.convert import joined, split
from planc.emulator.emit import BYTES, KIND, UNSIGNED, Code, Refused, allow, is_float
from planc.emulator.ptx import Imm, Instruction, Pair, Vec

_ROUNDING = ("rn", "ftz")  # subnormal numbers are kept: the difference is below 2e-38
_SYMBOL = {"add": "+", "sub": "-", "mul": "*"}
_COMPARE = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}


def _binary(code: Code, ins: Instruction) -> None:
    """add, sub, mul of floats, add and sub of integers"""
    ptx, symbol = ins.type, _SYMBOL[ins.name]
    allow(ins, *_ROUNDING, "sat", "lo")
    if is_float(ptx):
        values = [code.float(o, ptx) for o in ins.operands[1:3]]
        result = f"{values[0]} {symbol} {values[1]}"
        code.write_float(ins.operands[0], f"np.clip({result}, 0, 1)" if "sat" in ins.parts else result, ptx)
        return
    if "sat" in ins.parts:
        raise Refused(".sat of integers")
    kind = KIND[ptx]
    a, b = (code.read(o, kind) for o in ins.operands[1:3])
    code.write(ins.operands[0], f"{a} {symbol} {b}", kind)


def _wide(kind: str) -> str:
    return kind[0] + str(16 * BYTES[kind])


def _product(code: Code, ins: Instruction) -> str | None:
    """The product of two integers as text, of twice the width for .wide; None for floats."""
    kind = KIND[ins.type]
    a, b = (code.read(o, kind) for o in ins.operands[1:3])
    if "wide" in ins.parts:
        return f"{a}.astype({_wide(kind)}) * {b}.astype({_wide(kind)})"
    if "hi" in ins.parts:
        if BYTES[kind] == 8:
            return f"bits.high({a}, {b})"
        return f"(({a}.astype({_wide(kind)}) * {b}.astype({_wide(kind)})) >> {8 * BYTES[kind]}).astype({kind})"
    return f"{a} * {b}"


def _mul(code: Code, ins: Instruction) -> None:
    if is_float(ins.type):
        return _binary(code, ins)
    allow(ins, "lo", "hi", "wide")
    kind = KIND[ins.type]
    code.write(ins.operands[0], str(_product(code, ins)), _wide(kind) if "wide" in ins.parts else kind)


def _mad(code: Code, ins: Instruction) -> None:
    if is_float(ins.type):
        return _fma(code, ins)
    allow(ins, "lo", "hi", "wide")
    kind = KIND[ins.type]
    out = _wide(kind) if "wide" in ins.parts else kind
    product = _product(code, ins)
    code.write(ins.operands[0], f"({product}) + {code.read(ins.operands[3], out)}", out)


def _fma(code: Code, ins: Instruction) -> None:
    allow(ins, *_ROUNDING, "relu", "sat")
    ptx = ins.type
    a, b, c = (code.float(o, ptx) for o in ins.operands[1:4])
    result = f"({a}.astype(f64) * {b} + {c}).astype({'f64' if ptx == 'f64' else 'f32'})"  # exact product, one rounding
    if "relu" in ins.parts:
        result = f"np.maximum({result}, 0)"
    if "sat" in ins.parts:
        result = f"np.clip({result}, 0, 1)"
    code.write_float(ins.operands[0], result, ptx)


def _extreme(code: Code, ins: Instruction) -> None:
    allow(ins, "ftz", "NaN")
    ptx, name = ins.type, ins.name
    if is_float(ptx):
        function = f"np.{name}imum" if "NaN" in ins.parts else f"np.f{name}"
        values = [code.float(o, ptx) for o in ins.operands[1:]]
    else:
        function, values = f"np.{name}imum", [code.read(o, KIND[ptx]) for o in ins.operands[1:]]
    result = f"{function}({values[0]}, {values[1]})"
    for value in values[2:]:
        result = f"{function}({result}, {value})"
    if is_float(ptx):
        code.write_float(ins.operands[0], result, ptx)
    else:
        code.write(ins.operands[0], result, KIND[ptx])


def _div(code: Code, ins: Instruction) -> None:
    allow(ins, *_ROUNDING, "full", "approx")
    ptx = ins.type
    if is_float(ptx):
        a, b = (code.float(o, ptx) for o in ins.operands[1:3])
        return code.write_float(ins.operands[0], f"{a} / {b}", ptx)
    a, b = (code.read(o, KIND[ptx]) for o in ins.operands[1:3])
    code.write(ins.operands[0], f"({a} - np.fmod({a}, {b})) // {b}", KIND[ptx])  # towards zero


def _rem(code: Code, ins: Instruction) -> None:
    allow(ins)
    a, b = (code.read(o, KIND[ins.type]) for o in ins.operands[1:3])
    code.write(ins.operands[0], f"np.fmod({a}, {b})", KIND[ins.type])


def _logic(code: Code, ins: Instruction) -> None:
    allow(ins)
    kind = KIND[ins.type]
    a, b = (code.read(o, kind) for o in ins.operands[1:3])
    code.write(ins.operands[0], f"{a} {dict(zip(('and', 'or', 'xor'), '&|^', strict=True))[ins.name]} {b}", kind)


def _not(code: Code, ins: Instruction) -> None:
    allow(ins)
    kind = KIND[ins.type]
    code.write(ins.operands[0], f"~{code.read(ins.operands[1], kind)}", kind)


def _neg(code: Code, ins: Instruction) -> None:
    allow(ins, "ftz")
    _sign(code, ins, "-{}", "np.negative({})")


def _abs(code: Code, ins: Instruction) -> None:
    allow(ins, "ftz")
    _sign(code, ins, "np.abs({})", "np.abs({})")


def _sign(code: Code, ins: Instruction, of_float: str, of_int: str) -> None:
    ptx = ins.type
    if is_float(ptx):
        code.write_float(ins.operands[0], of_float.format(code.float(ins.operands[1], ptx)), ptx)
    else:
        code.write(ins.operands[0], of_int.format(code.read(ins.operands[1], KIND[ptx])), KIND[ptx])


def _shift(code: Code, ins: Instruction) -> None:
    """Counts beyond the width give 0, or the sign."""
    allow(ins)
    kind, bits = KIND[ins.type], 8 * BYTES[KIND[ins.type]]
    value, count, symbol = code.read(ins.operands[1], kind), ins.operands[2], "<<" if ins.name == "shl" else ">>"
    signed = symbol == ">>" and kind[0] == "i"
    if isinstance(count, Imm):
        number = min(count.bits & 0xFFFFFFFF, bits - 1 if signed else bits)
        if number == bits:
            return code.write(ins.operands[0], f"{value} & {code.constant(0, kind)}", kind)
        return code.write(ins.operands[0], f"{value} {symbol} {code.constant(number, kind)}", kind)
    number_name = code.read(count, "u32")
    shifted = f"{value} {symbol} np.minimum({number_name}, {code.constant(bits - 1, 'u32')}).astype({kind})"
    if not signed:
        shifted = f"where({number_name} < {code.constant(bits, 'u32')}, {shifted}, {code.constant(0, kind)})"
    code.write(ins.operands[0], shifted, kind)


def _shf(code: Code, ins: Instruction) -> None:
    """A funnel shift: the high (l) or low (r) word of b:a, shifted."""
    allow(ins, "l", "r", "wrap", "clamp")
    low, high, count = (code.read(o, "u32") for o in ins.operands[1:4])
    n = f"({count} & 31)" if "wrap" in ins.parts else f"np.minimum({count}, {code.constant(32, 'u32')})"
    both = f"(({high}.astype(u64) << 32) | {low})"
    shifted = f"(({both} << {n}.astype(u64)) >> 32)" if "l" in ins.parts else f"({both} >> {n}.astype(u64))"
    code.write(ins.operands[0], f"{shifted}.astype(u32)", "u32")


def _bfe(code: Code, ins: Instruction) -> None:
    allow(ins)
    kind = KIND[ins.type]
    value, start, length = code.read(ins.operands[1], kind), *(code.read(o, "u32") for o in ins.operands[2:4])
    code.write(ins.operands[0], f"bits.extract({value}, {start}, {length})", kind)


def _bfi(code: Code, ins: Instruction) -> None:
    allow(ins)
    kind = KIND[ins.type]
    inner, outer = (code.read(o, kind) for o in ins.operands[1:3])
    start, length = (code.read(o, "u32") for o in ins.operands[3:5])
    code.write(ins.operands[0], f"bits.insert({inner}, {outer}, {start}, {length})", kind)


def _prmt(code: Code, ins: Instruction) -> None:
    allow(ins)
    a, b = (code.read(o, "u32") for o in ins.operands[1:3])
    chosen = ins.operands[3]
    if isinstance(chosen, Imm):
        code.write(ins.operands[0], f"bits.permute({a}, {b}, {chosen.bits & 0xFFFF})", "u32")
    else:
        code.write(ins.operands[0], f"bits.permute_by({a}, {b}, {code.read(chosen, 'u32')})", "u32")


def _lop3(code: Code, ins: Instruction) -> None:
    allow(ins)
    a, b, c = (code.read(o, "u32") for o in ins.operands[1:4])
    table = ins.operands[4]
    if not isinstance(table, Imm):
        raise Refused("a table in a register")
    terms = []
    for row in range(8):
        if table.bits >> row & 1:
            terms.append("(" + " & ".join(n if row >> s & 1 else f"~{n}" for n, s in ((a, 2), (b, 1), (c, 0))) + ")")
    code.write(ins.operands[0], " | ".join(terms) or f"{a} & {code.constant(0, 'u32')}", "u32")


def _count_bits(code: Code, ins: Instruction) -> None:
    allow(ins)
    code.write(ins.operands[0], f"np.bitwise_count({code.read(ins.operands[1], KIND[ins.type])}).astype(u32)", "u32")


def _clz(code: Code, ins: Instruction) -> None:
    allow(ins)
    kind = KIND[ins.type]
    code.write(ins.operands[0], f"bits.leading_zeros({code.read(ins.operands[1], kind)})", "u32")


def _brev(code: Code, ins: Instruction) -> None:
    allow(ins)
    kind = KIND[ins.type]
    code.write(ins.operands[0], f"bits.reverse_bits({code.read(ins.operands[1], kind)})", kind)


def _comparison(code: Code, ins: Instruction) -> str:
    ptx, test = ins.type, ins.parts[1]
    floats = is_float(ptx)
    a, b = (code.float(o, ptx) if floats else code.read(o, KIND[ptx]) for o in ins.operands[1:3])
    unordered = f"(np.isnan({a}) | np.isnan({b}))"
    if test in ("nan", "num"):
        return unordered if test == "nan" else f"~{unordered}"
    if test in _COMPARE:
        result = f"({a} {_COMPARE[test]} {b})"
        return f"({result} & ~{unordered})" if floats and test == "ne" else result
    if floats and test.endswith("u") and test[:-1] in _COMPARE:
        return f"(({a} {_COMPARE[test[:-1]]} {b}) | {unordered})"
    raise Refused(f".{test}")


def _setp(code: Code, ins: Instruction) -> None:
    allow(ins, ins.parts[1], "and", "or", "xor", "ftz")
    result = code.let(_comparison(code, ins))
    joins = {"and": "&", "or": "|", "xor": "^"}
    join = next((joins[p] for p in ins.parts[2:] if p in joins), None)
    with_ = f" {join} {code.read(ins.operands[3], 'bool')}" if join else ""
    out = ins.operands[0]
    if isinstance(out, Pair):
        code.write(out.first, result + with_, "bool")
        code.write(out.second, f"~{result}{with_}", "bool")
    else:
        code.write(out, result + with_, "bool")


def _set(code: Code, ins: Instruction) -> None:
    """set.lt.u32.f32: all ones, or 1.0, where true"""
    allow(ins, ins.parts[1], "ftz")
    out = ins.parts[-2]
    true = code.constant(0x3F800000, "f32") if out == "f32" else code.constant(2**64 - 1, KIND[out])
    zero = code.constant(0, KIND[out])
    code.write(ins.operands[0], f"where({_comparison(code, ins)}, {true}, {zero})", KIND[out])


def _selp(code: Code, ins: Instruction) -> None:
    allow(ins)
    kind = KIND[ins.type]
    a, b = (code.read(o, kind) for o in ins.operands[1:3])
    code.write(ins.operands[0], f"where({code.read(ins.operands[3], 'bool')}, {a}, {b})", kind)


def _mov(code: Code, ins: Instruction) -> None:
    allow(ins)
    out, source = ins.operands
    if isinstance(out, Vec):
        return split(code, out, source, ins.type)
    if isinstance(source, Vec):
        return joined(code, out, source, ins.type)
    kind = "bool" if ins.type == "pred" else UNSIGNED[BYTES[KIND[ins.type]]]
    code.write(out, code.read(source, kind), kind)


def _unary(text: str) -> Callable[[Code, Instruction], None]:
    def rule(code: Code, ins: Instruction) -> None:
        allow(ins, *_ROUNDING, "approx")
        ptx = ins.type
        result = text.format(code.float(ins.operands[1], ptx))
        code.write_float(ins.operands[0], result, ptx)

    return rule


RULES: dict[str, Callable[[Code, Instruction], None]] = {
    "add": _binary, "sub": _binary, "mul": _mul, "mad": _mad, "fma": _fma, "min": _extreme, "max": _extreme,
    "div": _div, "rem": _rem, "and": _logic, "or": _logic, "xor": _logic, "not": _not, "neg": _neg, "abs": _abs,
    "shl": _shift, "shr": _shift, "shf": _shf, "bfe": _bfe, "bfi": _bfi, "prmt": _prmt, "lop3": _lop3,
    "popc": _count_bits, "clz": _clz, "brev": _brev, "setp": _setp, "set": _set, "selp": _selp, "mov": _mov,
    "ex2": _unary("np.exp2({})"), "lg2": _unary("np.log2({})"), "sqrt": _unary("np.sqrt({})"),
    "rsqrt": _unary("(1 / np.sqrt({0}.astype(f64))).astype({0}.dtype)"), "rcp": _unary("1 / {}"),
    "sin": _unary("np.sin({})"), "cos": _unary("np.cos({})"), "tanh": _unary("np.tanh({})"),
}  # fmt: skip
