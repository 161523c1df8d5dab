"""What the parts of the doctor find, and what they are told. Without PyTorch: the command shows it where that is
broken."""

import dataclasses

from configs.config import Config

STATES = (
    "OK",
    "slow",
    "broken",
    "not run",
)  # slow: it works, and could be faster, or nearer to the limit than it seems


@dataclasses.dataclass(frozen=True)
class Finding:
    """What came of one check. advice: what to do, unless it is OK. numbers: for doctor.json."""

    check: str
    state: str  # of STATES
    said: str
    advice: str = ""
    numbers: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        assert self.state in STATES


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a part is told."""

    arguments: tuple[str, ...]  # of train_gpt.py: the preset and its fields
    config: Config  # that they make
    price: float | None = None  # of an hour of one device
    folder: str = ""  # for its files, which are removed whatever becomes of it

    @property
    def preset(self) -> str:
        return self.arguments[0]


def one_line(text: object, most: int = 200) -> str:
    """Return what is said, on one line of at most so many characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def markdown(rows: list[list[str]]) -> str:
    """Return a table of text; the first row is its head."""
    head, *body = (f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])
