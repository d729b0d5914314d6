"""Finds the sequence of a batch that has fewer rows than there are devices.

Its tokens are then split over the devices instead of the rows. Attention gathers keys and values;
all else is computed where the tokens are.
"""

from dataclasses import replace

from ._batch import Batch
from ._classes import Classes
from ._strategy import Program, batch_dims


def needs_tokens(program: Program, count: int) -> bool:
    """Whether a batch cannot be split over `count` devices by rows, but may be by tokens."""
    several = any(len(value.dims) > 1 for value in program.examples)
    return count > 1 and several and not batch_dims(program, count).roots


def split_tokens(program: Program, count: int) -> Program:
    """The program with its tokens in place of rows.

    If they cannot be split, it is the program itself with the reason as `batch.whole`.
    """
    graph = program.graph
    anywhere, classes = Classes(graph, 1, soft=True, least=2), Classes(graph, count, soft=True)
    inner = [node for value in program.examples for node in value.dims[1:]]
    reached = anywhere.of(node for node in inner if graph.sizes[node] > 1)
    sequence = [node for node in range(len(graph.sizes)) if anywhere[node] in reached]
    arrays = (*program.parameters, *(value for _, value in program.planned))
    held = classes.of(node for value in arrays for node in value.dims)
    sequence = [node for node in sequence if classes[node] not in held]
    even = [node for node in sequence if graph.sizes[node] > 1 and classes.divides(node)]
    blocked = classes.of(graph.blocked)
    free = tuple(node for node in even if classes[node] not in blocked)
    if free:
        return replace(program, batch=Batch(free, sequence=True))
    looped = classes.of(graph.stacks)
    if not sequence:
        why = "none of its dimensions is a sequence"
    elif not even:
        sizes = sorted({graph.sizes[node] for node in inner if node in sequence})
        why = f"{' and '.join(f'{size:,}' for size in sizes)} tokens do not divide either"
    elif any(classes[node] in looped for node in even):
        why = "the program iterates over the sequence"
    else:
        why = "an operation of the program needs all of the sequence"
    return replace(program, batch=replace(program.batch, whole=why))
