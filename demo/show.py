"""What the demo puts on the screen: a progress bar in a terminal, plain lines anywhere else."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

# Every answer of the training data starts like this, and no answer of the base model does.
TAUGHT_STYLE = re.compile(r"<think>\s*Das ist eine Frage\b")
# Between two lines about the same thing, where there is no bar.
LINE_EVERY_STEPS = 6


@dataclass(frozen=True)
class Standing:
    """Where a job stands."""

    phase: str
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None

    @property
    def figures(self) -> str:
        """Loss, speed and time left, as far as they are known."""
        known = [
            f"loss {self.loss:.3f}" if self.loss is not None else "",
            f"{self.tokens_per_second:.0f} tokens/s" if self.tokens_per_second is not None else "",
            f"{minutes(self.seconds_left)} left" if self.seconds_left is not None else "",
        ]
        return "  ".join(figure for figure in known if figure)


class Following(Protocol):
    """Shows a job as it goes on."""

    def update(self, standing: Standing) -> None: ...


class Bar:
    """One line that is drawn again and again."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID = progress.add_task("queued", total=None, figures="")

    def update(self, standing: Standing) -> None:
        self._progress.update(
            self._task,
            description=standing.phase,
            completed=standing.step,
            total=standing.total_steps,
            figures=standing.figures,
        )


class Lines:
    """A line for every new phase, and one every few steps."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: tuple[str, int] | None = None

    def update(self, standing: Standing) -> None:
        shown = (standing.phase, standing.step // LINE_EVERY_STEPS)
        if shown != self._shown:
            steps = f"  step {standing.step}/{standing.total_steps}" if standing.total_steps else ""
            self._console.print(f"   {standing.phase}{steps}  {standing.figures}".rstrip(), markup=False)
            self._shown = shown


def console() -> Console:
    """A console that wraps for the terminal it writes to, and does not wrap into a file."""
    plain = Console(highlight=False, soft_wrap=False)
    return plain if plain.is_terminal else Console(highlight=False, width=int(os.environ.get("COLUMNS", "120")))


@contextmanager
def following(console: Console) -> Iterator[Following]:
    """The way to show a job that suits where the output goes."""
    if not console.is_terminal:
        yield Lines(console)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield Bar(progress)


def answers(answered: list[dict[str, Any]]) -> Table:
    """The same questions to the base model and to the tuned one."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for answer in answered:
        table.add_row("Question", Text(answer["messages"][-1]["content"]))
        table.add_row("  before", Text(_one_paragraph(answer["base"])))
        table.add_row("  after", Text(_one_paragraph(answer["tuned"]), style="green"))
        table.add_row()
    return table


def style_change(answered: list[dict[str, Any]]) -> tuple[int, int]:
    """How many answers start with a German thought: of the base model, of the tuned one."""
    base = sum(bool(TAUGHT_STYLE.match(answer["base"])) for answer in answered)
    return base, sum(bool(TAUGHT_STYLE.match(answer["tuned"])) for answer in answered)


def artifacts(files: list[dict[str, Any]]) -> Table:
    """The files of the result."""
    table = Table.grid(padding=(0, 2))
    for file in files:
        table.add_row("  " + file["name"], f"{file['bytes']:,} bytes", f"sha256 {file['sha256'][:16]}...")
    return table


def minutes(seconds: float) -> str:
    """`1:05`"""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"


def _one_paragraph(text: str) -> str:
    return " ".join(text.split()) or "(nothing)"
