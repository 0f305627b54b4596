"""Complex tensors as pairs of real ones: in goes a call, out come rules that work on both parts."""

from collections.abc import Callable

from planc.compiler.lift.call import Call
from planc.compiler.lift.form import Complex, Form
from planc.compiler.lift.pointwise import Operand, apply, combine, pair
from planc.compiler.lift.views import join, pick_one


def view_as_complex(call: Call) -> Complex:
    """x[..., 2] as one complex axis less."""
    x = call.form("self")
    real, imag = (pick_one(call, x, len(x.dims) - 1, i) for i in (0, 1))
    return Complex(real, imag)


def view_as_real(call: Call) -> Form:
    """A complex tensor as x[..., 2]."""
    z = _own(call)
    order: list[int | None] = [*range(len(z.real.dims)), None]
    return join(call, [z.real.pick(order), z.imag.pick(order)], len(z.real.dims))


def polar(call: Call) -> Complex:
    """abs (cos(angle) + i sin(angle))."""
    size, angle = call.form("abs"), call.form("angle")
    return Complex(*(pair(call, "mul", size, apply(call, f, angle)) for f in ("cos", "sin")))


def make(call: Call) -> Complex:
    """real + i imag."""
    return Complex(call.form("real"), call.form("imag"))


def part(name: str) -> Callable[[Call], Form]:
    """The real or the imaginary part."""
    return lambda call: getattr(_own(call), name)  # type: ignore[no-any-return]


def _own(call: Call) -> Complex:
    z = call.complex("self")
    if z is None:
        raise call.fail("self is real, expected a complex tensor")
    return z


def multiply(call: Call) -> Complex:
    """A product of two complex tensors, or of a complex and a real one."""
    a, b = call.complex("self"), call.complex("other")
    if a is None or b is None:
        z, x = (a, call.operand("other")) if b is None else (b, call.operand("self"))
        assert z is not None
        return Complex(pair(call, "mul", z.real, x), pair(call, "mul", z.imag, x))
    real = pair(call, "sub", pair(call, "mul", a.real, b.real), pair(call, "mul", a.imag, b.imag))
    imag = pair(call, "add", pair(call, "mul", a.real, b.imag), pair(call, "mul", a.imag, b.real))
    return Complex(real, imag)


def added(op: str) -> Callable[[Call], Complex]:
    """A sum or a difference, of which one may be real."""

    def rule(call: Call) -> Complex:
        (a, i), (b, j) = _parts(call, "self"), _parts(call, "other")
        return Complex(combine(call, op, a, b), combine(call, op, i, j))

    return rule


def _parts(call: Call, name: str) -> tuple[Operand, Operand]:
    z = call.complex(name)
    return (call.operand(name), 0.0) if z is None else (z.real, z.imag)


def divide(call: Call) -> Complex:
    """A complex tensor by a real one."""
    z, x = call.complex("self"), call.complex("other")
    if z is None or x is not None:
        raise call.fail("division by a complex tensor")
    by = call.operand("other")
    return Complex(combine(call, "div", z.real, by), combine(call, "div", z.imag, by))
