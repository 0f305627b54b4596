"""The text form: in goes a graph, out comes one line a node, and back; printing then parsing gives an equal graph."""

import ast
import re
from math import isinf

from planc.compiler.ir.graph import Graph, Node, Value, Weight
from planc.compiler.ir.recipe import Recipe
from planc.compiler.ir.types import Attr, Dim, TensorType

_TYPE = r"\w+\[[^\]]*\](?:@(?:strides:\d+(?:,\d+)*|\w+))?"
_VALUE = re.compile(rf"%(?P<name>[^\s:,()]+): (?P<type>{_TYPE})(?: at (?P<addr>0x[0-9a-f]+))?(?=[,)]|\s|$)")
_CALL = re.compile(r"(?P<op>\w+)\((?P<args>.*)\)$")


def to_text(graph: Graph) -> str:
    """The graph as text."""
    lines = [f"graph {graph.name}(" + ", ".join(_value(v) for v in graph.inputs) + ") {"]
    lines += [f"  weight {_value(w.value)} = {recipe_text(w.recipe)}" for w in graph.weights]
    lines += [f"  {_node(n)}" for n in graph.nodes]
    lines += ["  return " + ", ".join(f"%{o}" for o in graph.outputs), "}"]
    return "\n".join(lines) + "\n"


def _value(v: Value) -> str:
    return f"%{v.name}: {v.type}" + ("" if v.addr is None else f" at {v.addr:#x}")


def _attrs(attrs: tuple[tuple[str, Attr], ...]) -> list[str]:
    return [f"{k}={_attr(v)}" for k, v in attrs]


def _attr(value: Attr) -> str:
    """As Python writes it, but for infinities, which have no literal: a number too large is read as one."""
    return repr(value).replace("inf", "1e999") if isinstance(value, float) and isinf(value) else repr(value)


def _node(n: Node) -> str:
    head = ", ".join(_value(v) for v in n.outputs)
    call = f"{n.op}(" + ", ".join([*(f"%{i}" for i in n.inputs), *_attrs(n.attrs)]) + ")"
    return (f"{head} = " if head else "") + call + (f"  # {n.loc}" if n.loc else "")


def recipe_text(r: Recipe) -> str:
    """A recipe as nested calls."""
    return f"{r.op}(" + ", ".join([*(recipe_text(i) for i in r.inputs), *_attrs(r.attrs)]) + ")"


def parse(text: str) -> Graph:
    """The graph that `to_text` printed; ValueError names the line that does not parse."""
    lines = text.strip().splitlines()
    head = re.fullmatch(r"graph (\S+)\((.*)\) \{", lines[0])
    if not head or lines[-1] != "}" or not lines[-2].startswith("  return "):
        raise ValueError("a graph starts with 'graph name(...) {' and ends with a return line and '}'")
    inputs = tuple(_values(head[2]))
    weights: list[Weight] = []
    nodes: list[Node] = []
    for number, line in enumerate(lines[1:-2], 2):
        try:
            body = line.strip()
            if body.startswith("weight "):
                weights.append(_parse_weight(body.removeprefix("weight ")))
            else:
                nodes.append(_parse_node(body))
        except (ValueError, SyntaxError, TypeError) as e:
            raise ValueError(f"line {number}: {e}: {line.strip()[:120]}") from e
    outputs = tuple(o.strip().removeprefix("%") for o in lines[-2].removeprefix("  return ").split(","))
    return Graph(head[1], inputs, tuple(weights), tuple(nodes), outputs)


def _values(text: str) -> list[Value]:
    out = []
    for m in _VALUE.finditer(text):
        addr = int(m["addr"], 16) if m["addr"] else None
        out.append(Value(m["name"], _type(m["type"]), addr))
    return out


def _type(text: str) -> TensorType:
    m = re.fullmatch(r"(\w+)\[([^\]]*)\](?:@(.+))?", text)
    if not m:
        raise ValueError(f"not a type: {text}")
    dims: list[Dim] = [int(d) if d.strip().isdigit() else d.strip() for d in m[2].split(",") if d.strip()]
    return TensorType(m[1], tuple(dims), m[3] or "row")


def _parse_weight(body: str) -> Weight:
    head, _, recipe = body.partition(" = ")
    (value,) = _values(head)
    return Weight(value, _recipe(ast.parse(recipe, mode="eval").body))


def _recipe(tree: ast.expr) -> Recipe:
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise ValueError("a recipe is a call")
    attrs = tuple((str(k.arg), ast.literal_eval(k.value)) for k in tree.keywords)
    return Recipe(tree.func.id, tuple(_recipe(a) for a in tree.args), attrs)


def _parse_node(body: str) -> Node:
    body, _, loc = body.partition("  # ")
    head, _, call = body.rpartition(" = ") if body.startswith("%") else ("", "", body)
    m = _CALL.match(call)
    if not m:
        raise ValueError("not a call")
    names, rest = [], m["args"]
    while name := re.match(r"%([^\s,()]+)(?:, )?", rest):
        names.append(name[1])
        rest = rest[name.end() :]
    tree = ast.parse(f"f({rest})", mode="eval").body
    assert isinstance(tree, ast.Call)
    attrs = tuple((str(k.arg), ast.literal_eval(k.value)) for k in tree.keywords)
    return Node(m["op"], tuple(names), tuple(_values(head)), attrs, loc)
