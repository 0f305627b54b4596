"""A build's progress that tests read: in go its lines, out they come as a list."""

from planc.compiler.progress import Progress


class Heard(Progress):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)
