"""The text form: in goes a graph, out comes one line a node, and back; printing then parsing gives an equal graph."""

import ast
import re
from dataclasses import dataclass, field
from functools import lru_cache
from math import isinf
from pathlib import Path

from planc.compiler.ir.graph import Graph, Node, Value, Weight
from planc.compiler.ir.recipe import Recipe
from planc.compiler.ir.types import Attr, Dim, TensorType
from planc.errors import PlancError

_TYPE = r"\w+\[[^\]]*\](?:@(?:strides:\d+(?:,\d+)*|\w+))?"
_VALUE = re.compile(rf"%(?P<name>[^\s:,()]+): (?P<type>{_TYPE})(?: at (?P<addr>0x[0-9a-f]+))?(?=[,)]|\s|$)")
_CALL = re.compile(r"(?P<op>\w+)\((?P<args>.*)\)$")
_OPEN = re.compile(r"(\w+)\(")
_ATTR = re.compile(
    r"""(\w+)=('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\([^()'"]*\)|[^\s,()'"]+)"""  # a string, a tuple, a number
)


@dataclass
class Recipes:
    """Texts of recipes, each printed and parsed once: the next graph of a build holds most of them again."""

    texts: dict[Recipe, str] = field(default_factory=dict)
    parsed: dict[str, Recipe] = field(default_factory=dict)

    def keep(self, graph: Graph) -> None:
        """Keeps the graph's recipes, of which each was found to be what its text parses to, and forgets all others."""
        self.texts = {w.recipe: self.texts[w.recipe] for w in graph.weights}
        self.parsed = {text: recipe for recipe, text in self.texts.items()}


def to_text(graph: Graph, recipes: Recipes | None = None) -> str:
    """The graph as text. Texts that `recipes` knows are not made again, new ones are added."""
    texts = (recipes or Recipes()).texts
    for w in graph.weights:
        if w.recipe not in texts:
            texts[w.recipe] = recipe_text(w.recipe)
    lines = [f"graph {graph.name}(" + ", ".join(_value(v) for v in graph.inputs) + ") {"]
    lines += [f"  weight {_value(w.value)} = {texts[w.recipe]}" for w in graph.weights]
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


def parse(text: str, recipes: Recipes | None = None) -> Graph:
    """The graph that `to_text` printed; ValueError names the line that does not parse."""
    known = recipes.parsed if recipes else {}
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
                weights.append(_parse_weight(body.removeprefix("weight "), known))
            else:
                nodes.append(_parse_node(body))
        except (ValueError, SyntaxError, TypeError) as e:
            raise ValueError(f"line {number}: {e}: {line.strip()[:120]}") from e
    outputs = tuple(o.strip().removeprefix("%") for o in lines[-2].removeprefix("  return ").split(","))
    return Graph(head[1], inputs, tuple(weights), tuple(nodes), outputs)


def read(path: Path) -> Graph:
    """The graph of a plan's file; PlancError when it is missing or no graph."""
    try:
        return parse(path.read_text())
    except FileNotFoundError:
        raise PlancError(f"{path} is missing; build the plan again.") from None
    except (ValueError, IndexError) as e:
        raise PlancError(f"{path}: {e}. Build the plan again.") from e


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


def _parse_weight(body: str, known: dict[str, Recipe]) -> Weight:
    head, _, text = body.partition(" = ")
    (value,) = _values(head)
    if text in known:
        return Weight(value, known[text])
    recipe, end = _recipe(text, 0)
    if end != len(text):
        raise ValueError(f"more than a recipe: {text[end : end + 40]}")
    return Weight(value, recipe)


def _recipe(text: str, at: int) -> tuple[Recipe, int]:
    """The recipe that begins at `at`, and where it ends."""
    head = _OPEN.match(text, at)
    if head is None:
        raise ValueError("a recipe is a call")
    inputs, attrs, end = _arguments(text, head.end())
    return Recipe(head[1], inputs, attrs), end


def _arguments(text: str, at: int) -> tuple[tuple[Recipe, ...], tuple[tuple[str, Attr], ...], int]:
    """Recipes, then attributes, up to the closing bracket. Python's own parser is slow on thousands of tensors."""
    inputs: list[Recipe] = []
    attrs: list[tuple[str, Attr]] = []
    while not text.startswith(")", at):
        if attr := _ATTR.match(text, at):
            attrs.append((attr[1], _literal(attr[2])))
            at = attr.end()
        elif attrs:
            raise ValueError(f"not an attribute: {text[at : at + 40]}")
        else:
            made, at = _recipe(text, at)
            inputs.append(made)
        if text.startswith(", ", at):
            at += 2
        elif not text.startswith(")", at):
            raise ValueError(f"neither ', ' nor ')': {text[at : at + 40]}")
    return tuple(inputs), tuple(attrs), at + 1


def _literal(text: str) -> Attr:
    plain = text[0] in "'\"" and "\\" not in text
    return text[1:-1] if plain else _evaluated(text)


@lru_cache(maxsize=4096)
def _evaluated(text: str) -> Attr:
    value: Attr = ast.literal_eval(text)
    return value


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
    inputs, attrs, end = _arguments(f"{rest})", 0)
    if inputs or end != len(rest) + 1:
        raise ValueError(f"neither a value nor an attribute: {rest[:40]}")
    return Node(m["op"], tuple(names), tuple(_values(head)), attrs, loc)
