"""Progress of a build: in go stages and counts, out come rich bars on a terminal and plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as RichProgress


class Progress:
    """Reports each stage with its seconds. Bars only where a person watches; a line a stage in logs."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._live = self._console.is_terminal and sys.stderr.isatty()
        self._bars: list[RichProgress] = []
        self.seconds: dict[str, float] = {}  # of each stage that is done, in order

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        """Takes down bars that an error or an interrupt left standing."""
        for bar in self._bars:
            bar.stop()

    def say(self, text: str) -> None:
        """A line of its own."""
        self._console.print(text, soft_wrap=True, markup=False)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage that cannot be counted: a spinner, then one line with the seconds."""
        start = time.perf_counter()
        if self._live:
            with self._console.status(name):
                yield
        else:
            yield
        self._done(name, start)

    def bytes(self, name: str, total: int) -> Callable[[int], None]:
        """A callback that takes bytes as they are done."""
        return self._bar(name, total, DownloadColumn())

    def rows(self, name: str, total: int) -> Callable[[int], None]:
        """A callback that takes counts as they are done."""
        return self._bar(name, total, MofNCompleteColumn())

    def counter(self, name: str) -> Callable[[int, int, str], None]:
        """A callback that takes (done, total, what), whose total is known at the first call."""
        bars: list[Callable[[int], None]] = []
        seen = [0]

        def report(done: int, total: int, what: str) -> None:
            if not bars:
                bars.append(self.rows(name, total))
            bars[0](done - seen[0])
            seen[0] = done

        return report

    def _bar(self, name: str, total: int, column: ProgressColumn) -> Callable[[int], None]:
        start = time.perf_counter()
        done = [0]
        bar = self._start_bar(name, total, column) if self._live else None

        def advance(n: int) -> None:
            done[0] += n
            if bar:
                bar[0].update(bar[1], completed=done[0])
            if done[0] >= total > 0:
                if bar:
                    bar[0].stop()
                done[0] = -(1 << 62)  # reported once
                self._done(name, start)

        return advance

    def _start_bar(self, name: str, total: int, column: ProgressColumn) -> tuple[RichProgress, TaskID]:
        bar = RichProgress(
            SpinnerColumn(), TextColumn(name), BarColumn(), column, TimeElapsedColumn(),
            console=self._console, transient=True,
        )  # fmt: skip
        task = bar.add_task(name, total=total)
        bar.start()
        self._bars.append(bar)
        return bar, task

    def _done(self, name: str, start: float) -> None:
        seconds = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.say(f"{name:<24} {seconds:7.1f} s")
