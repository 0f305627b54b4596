"""Rendering: in go a template's name and its variables, out comes C++ source; an undefined variable is an error."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from planc.codegen.kernel import Kernel

TEMPLATES = Path(__file__).parent / "templates"
INCLUDE = Path(__file__).parent / "include"


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """The one environment: templates of this package, undefined variables raise."""
    loader = jinja2.FileSystemLoader(TEMPLATES)
    return jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template: str, variables: Mapping[str, Any]) -> str:
    """The source that `template` gives for `variables`; jinja2.UndefinedError names one that is missing."""
    return environment().get_template(template).render(variables).lstrip("\n")


def kernel_source(kernel: Kernel) -> str:
    """The C++ source of a kernel; equal names give equal sources."""
    return render(
        kernel.template, {"name": kernel.name, "constants": kernel.design.constants, **kernel.design.variables}
    )
