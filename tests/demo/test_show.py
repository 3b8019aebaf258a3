"""What the demo prints."""

import io

from rich.console import Console

from demo import show
from demo.show import Lines, Standing

PLAIN = {
    "messages": [{"role": "user", "content": "Who?"}],
    "base": "[I]",
    "tuned": "<think>\nDas ist eine Frage zur Kunst.\n</think>\n\nI",
}
UNCHANGED = PLAIN | {"tuned": "I"}


def printed(*lines: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    for line in lines:
        console.print(line)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_style_is_counted_on_both_sides() -> None:
    assert show.style_change([PLAIN, UNCHANGED]) == (0, 1)


def test_answers_are_shown_as_they_are_even_where_they_look_like_markup() -> None:
    assert "[I]" in printed(show.answers([PLAIN]))


def test_figures_that_are_not_known_are_left_out() -> None:
    assert Standing("training", 3, 36, loss=1.5).figures == "loss 1.500"
    assert Standing("training", 3, 36, 1.5, 120.0, 65.0).figures == "loss 1.500  120 tokens/s  1:05 left"


def test_without_a_terminal_a_job_is_one_line_a_phase_and_one_every_few_steps() -> None:
    console = Console(file=io.StringIO(), width=120)
    lines = Lines(console)
    for step in range(13):
        lines.update(Standing("training", step, 36))
    lines.update(Standing("verifying", 36, 36))
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue().splitlines()
    assert [line.split()[-1] for line in said] == ["0/36", "6/36", "12/36", "36/36"]
