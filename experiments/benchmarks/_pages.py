"""Writes results between marks in the pages of `docs/`."""

from pathlib import Path


def between_marks(text: str, name: str, new: str) -> str:
    """The text with everything between the marks of a name replaced."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SystemExit(f"The page must have one line {begin} and after it one line {end}.")
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{new}\n\n{end}{rest.split(end)[1]}"


def number(value: int | float | None, form: str, missing: str = "-") -> str:
    """The cell of a number in a table, or a sign in place of one that is missing."""
    if value is None:
        return missing
    return f"{value:{form}}"


class Printed:
    """Prints the lines of a table as they are measured, and then writes them into a page."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, *lines: str) -> None:
        for line in lines:
            print(line, flush=True)
        self.lines += lines

    def row(self, *cells: object) -> None:
        self.add(f"| {' | '.join(map(str, cells))} |")

    def write(self, page: Path | None, name: str) -> None:
        """Replaces what is between the marks `name` of the page, if there is a page."""
        if page is not None:
            text = between_marks(page.read_text("utf-8"), name, "\n".join(self.lines))
            page.write_text(text, "utf-8")

    def update(self, page: Path | None, name: str) -> None:
        """Replaces only those rows of the page's table whose first cell is one of these lines'."""
        if page is None:
            return
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before = page.read_text("utf-8").split(begin)[-1].split(end)[0].strip().splitlines()
        first_cell = lambda line: line.split("|")[1].strip()
        measured = {first_cell(line): line for line in self.lines}
        self.lines = [measured.get(first_cell(line), line) for line in before]
        self.write(page, name)
