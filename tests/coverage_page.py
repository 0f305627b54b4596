"""`docs/coverage.md` read back: out come the types by verdict."""

from pathlib import Path

from planc.compiler.coverage.report import TITLES

PAGE = Path(__file__).parent.parent / "docs" / "coverage.md"


def verdicts() -> dict[str, str]:
    """The verdict of each type that the page lists."""
    found: dict[str, str] = {}
    of_title = {title: verdict for verdict, title in TITLES.items()}
    verdict = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            verdict = of_title[line.removeprefix("## ")]
        elif line.startswith("| ") and not line.startswith("| type |"):
            found[line.split("|")[1].strip()] = verdict
    return found


def compiled() -> list[str]:
    """The types that the page says are compiled; none where there is no page yet."""
    return [name for name, verdict in verdicts().items() if verdict == "ok"] if PAGE.exists() else []
