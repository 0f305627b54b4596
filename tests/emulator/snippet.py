"""A few lines of PTX run on arrays: in go instructions and one array an operand, out come the values they give."""

from __future__ import annotations

import numpy as np

from planc.emulator.run import run_kernel

BITS = {"r": 32, "h": 16, "l": 64}  # register families of the template: %r, %h, %l
HEAD = """.version 9.0
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 dynamic[];
"""


def entry(body: str, params: list[str], threads: int = 32) -> str:
    """A kernel named k around a body; params are types, k_param_0 and so on."""
    declared = ",\n".join(f".param {kind} k_param_{n}" for n, kind in enumerate(params))
    return f"""{HEAD}.visible .entry k(
{declared}
)
.reqntid {threads}
{{
.reg .pred %p<20>;
.reg .b16 %h<20>;
.reg .b32 %r<80>;
.reg .b64 %l<40>;
{body}
ret;
}}
"""


def family(array: np.ndarray) -> str:
    return {2: "h", 4: "r", 8: "l"}[array.itemsize]


def compute(lines: str, inputs: list[np.ndarray], out: np.dtype | type, setup: str = "") -> np.ndarray:
    """Runs lines for each element: operand i is {i}, the result {d}; all arrays are of one length, a multiple of 32."""
    count = len(inputs[0])
    result = np.zeros(count, out)
    body = ["mov.u32 %r70, %tid.x;", "mov.u32 %r71, %ctaid.x;", "mad.lo.s32 %r72, %r71, 32, %r70;"]
    names = {}
    for n, array in enumerate([*inputs, result]):
        body += [
            f"ld.param.u64 %l{20 + n}, [k_param_{n}];",
            f"mad.wide.u32 %l{20 + n}, %r72, {array.itemsize}, %l{20 + n};",
        ]
        name = f"%{family(array)}{10 + n}"
        if n < len(inputs):
            body.append(f"ld.global.b{8 * array.itemsize} {name}, [%l{20 + n}];")
            names[str(n)] = name
        else:
            names["d"] = name
    text = lines
    for key, name in names.items():
        text = text.replace(f"<{key}>", name)
    body += [setup, text, f"st.global.b{8 * result.itemsize} [%l{20 + len(inputs)}], {names['d']};"]
    arrays = [*map(np.ascontiguousarray, inputs), result]
    run_kernel(entry("\n".join(body), [".u64"] * len(arrays)), (count // 32, 1, 1), arrays, 0)
    return result
