"""Proof, from a workspace alone, of when each of its trainers lived: every one writes the time into a file of its own."""

import os
import threading
import time
from pathlib import Path

EVERY_S = 0.05


def stamp(root: Path) -> None:
    """This process lives now: by the host's clock since its boot, which no one sets back."""
    with (root / f"alive-{os.getpid()}").open("a") as file:
        file.write(f"{time.clock_gettime(time.CLOCK_BOOTTIME):.6f}\n")


def keep_stamping(root: Path) -> None:
    """The same from a thread, for as long as this process lives: for a trainer that knows nothing of it."""
    threading.Thread(target=_stamp_for_ever, args=(root,), daemon=True).start()


def lives(root: Path) -> list[tuple[float, float]]:
    """Of every trainer that ran here the first and the last moment. A line that a kill has cut is left out."""
    stamps = [path.read_text().split("\n")[:-1] for path in root.glob("alive-*")]
    return [(float(lines[0]), float(lines[-1])) for lines in stamps if lines]


def _stamp_for_ever(root: Path) -> None:
    while True:
        stamp(root)
        time.sleep(EVERY_S)
