"""The lines of source code that the instructions of compiled HLO come from."""

import re
from collections.abc import Callable

Frame = tuple[str, int]  # a file and the number of a line

# A table is a line with its name, and a line for each entry, which begins with its number:
# `1 "train.py"` of files, `1 {file_name_id=1 function_name_id=2 line=30 ...}` of
# locations, and `2 {file_location_id=1 parent_frame_id=1}` of frames.
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_FILE = re.compile(r'^(\d+) "(.*)"$')
_NUMBERS = re.compile(r"(\w+)=(\d+)")
_FRAME_ID = re.compile(r"\bstack_frame_id=(\d+)")
_SOURCE = re.compile(r'\bsource_file="((?:[^"\\]|\\.)*)"(?: source_line=(\d+))?')
_DEEPEST = 200  # frames, in case a damaged table has a cycle


def read_frames(text: str) -> Callable[[str], list[Frame]]:
    """Returns a function that gives the lines of an instruction's metadata, innermost first.

    Compilers write them as tables before the computations, or an innermost line for each
    instruction.
    """
    files: dict[int, str] = {}
    locations: dict[int, dict[str, int]] = {}
    stack: dict[int, dict[str, int]] = {}
    table = ""
    for line in text.split("\n"):
        if line in _TABLES:
            table = line
        elif line.startswith(("%", "ENTRY")):
            break  # the tables come first
        elif not line.strip():
            continue
        elif table == "FileNames":
            name = _FILE.match(line)
            if name:
                files[int(name[1])] = name[2]
        elif table in ("FileLocations", "StackFrames"):
            row = {key: int(number) for key, number in _NUMBERS.findall(line)}
            rows = stack
            if table == "FileLocations":
                rows = locations
            number = line.partition(" ")[0]
            if number.isdecimal():
                rows[int(number)] = row

    # XLA adds one to the number of the frame around each, so that a frame without one has 1.
    adds_one = any(row.get("parent_frame_id") == number for number, row in stack.items())

    def frames_of(metadata: str) -> list[Frame]:
        frame = _FRAME_ID.search(metadata)
        if frame is None:
            source = _SOURCE.search(metadata)
            if source is None:
                return []
            return [(source[1], int(source[2] or 0))]
        frames: list[Frame] = []
        # From the innermost frame outwards.
        number = int(frame[1])
        while number in stack and len(frames) < _DEEPEST:
            location = locations.get(stack[number].get("file_location_id", 0), {})
            file = files.get(location.get("file_name_id", 0), "")
            frames.append((file, location.get("line", 0)))
            number = stack[number].get("parent_frame_id", 0) - adds_one
        return frames

    return frames_of
