"""Finds the sequence of a batch that has fewer rows than there are devices.

Its tokens are then split over the devices instead of the rows. Attention gathers keys and values;
all else is computed where the tokens are.
"""

from collections.abc import Callable
from dataclasses import replace

from ...core._sequence_parts import divided_into
from ._batch import BatchNodes
from ._classes import Classes
from ._strategy import Program, batch_dims


def needs_tokens(program: Program, count: int) -> bool:
    """Whether a batch cannot be split over `count` devices by rows, but may be by tokens."""
    several = any(len(value.dims) > 1 for value in program.examples)
    return count > 1 and several and not batch_dims(program, count).roots


def split_tokens(program: Program, count: int, trace: Callable[[], Program]) -> Program:
    """The program with its tokens in place of rows; `trace` traces it again.

    If they cannot be split, it has the reason as `batch.whole`.
    """
    if not no_tokens(program, count):
        # Attention and losses have a dimension for the parts.
        with divided_into(count):
            program = trace()
    graph, classes = program.graph, Classes(program.graph, count, soft=True)
    _, even = _sequence(program, classes)
    blocked, looped = classes.of(graph.blocked), classes.of(graph.stacks)
    free = tuple(node for node in even if classes[node] not in blocked)
    if free:
        return replace(program, batch=BatchNodes(free, sequence=True))
    why = no_tokens(program, count) or "an operation of the program needs all of the sequence"
    if any(classes[node] in looped for node in even):
        why = "the program iterates over the sequence"
    return replace(program, batch=replace(program.batch, whole=why))


def no_tokens(program: Program, count: int) -> str:
    """The reason if there are no tokens that `count` devices divide, and `""` if there are."""
    sequence, even = _sequence(program, Classes(program.graph, count, soft=True))
    if even:
        return ""
    if not sequence:
        return "none of its dimensions is a sequence"
    inner = {node for value in program.examples for node in value.dims[1:]}
    sizes = sorted({program.graph.sizes[node] for node in inner.intersection(sequence)})
    return f"{' and '.join(f'{size:,}' for size in sizes)} tokens do not divide either"


def _sequence(program: Program, classes: Classes) -> tuple[list[int], list[int]]:
    """The dimensions of tokens, as nodes, and those of them that the devices divide."""
    graph = program.graph
    anywhere = Classes(graph, 1, soft=True, least=2)
    inner = [node for value in program.examples for node in value.dims[1:]]
    reached = anywhere.of(node for node in inner if graph.sizes[node] > 1)
    arrays = (*program.parameters, *(value for _, value in program.planned))
    held = classes.of(node for value in arrays for node in value.dims)
    nodes = (node for node in range(len(graph.sizes)) if anywhere[node] in reached)
    sequence = [node for node in nodes if classes[node] not in held]
    return sequence, [n for n in sequence if graph.sizes[n] > 1 and classes.divides(n)]
