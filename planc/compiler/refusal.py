"""Refusals: in goes why a model cannot be compiled, out comes the error with what its user can do about it."""

from planc.errors import PlancError

NEXT_STEP = "This model cannot be compiled yet: run it with transformers, or open an issue with this message."


def refused(why: str) -> PlancError:
    """The error to raise: `why` as a sentence, then the next step."""
    return PlancError(f"{why.rstrip('.')}. {NEXT_STEP}")


def source_place(filename: str, line: int | str) -> str:
    """file:line, without the folder that packages are installed in."""
    return f"{filename.rpartition('site-packages/')[2]}:{line}"
