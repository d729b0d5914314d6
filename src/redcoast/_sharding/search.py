"""The cheapest set of classes to split, by moves from several starts."""

from collections.abc import Iterator

from .price import Choice, Problem

# So few groups that all of their sets can be tried.
FEW = 10
# Below this difference two prices are the same, to the last bits of floating point.
_SAME = 1e-9


def search(problem: Problem) -> Choice:
    """The cheapest allowed set of groups; of equal ones, the one found first.

    All sets, if there are few groups; otherwise additions, removals and exchanges that lower the
    price until none does, from the empty set and from each group.
    """
    if len(problem.groups) <= FEW:
        return min(_all(problem), key=lambda chosen: _rounded(problem, chosen))
    starts = [frozenset(), *(frozenset([one]) for one in problem.groups)]
    return min(
        (_descend(problem, start) for start in starts),
        key=lambda chosen: _rounded(problem, chosen),
    )


def _rounded(problem: Problem, chosen: Choice) -> float:
    return float(f"{problem.price(chosen):.9g}")


def _all(problem: Problem) -> Iterator[Choice]:
    """Every allowed set."""

    def extend(chosen: Choice, rest: list[int]) -> Iterator[Choice]:
        yield chosen
        for i, one in enumerate(rest):
            free = [other for other in rest[i + 1 :] if other not in problem.against[one]]
            yield from extend(chosen | {one}, free)

    return extend(frozenset(), problem.groups)


def _descend(problem: Problem, chosen: Choice) -> Choice:
    price = problem.price(chosen)
    while True:
        moves = [(problem.price(move), sorted(move), move) for move in _moves(problem, chosen)]
        best = min(moves, default=(price, [], chosen))
        if best[0] >= price * (1 - _SAME):
            return chosen
        price, _, chosen = best


def _moves(problem: Problem, chosen: Choice) -> Iterator[Choice]:
    for one in problem.groups:
        if one in chosen:
            yield chosen - {one}
        else:
            # Adding one means giving up what it is in conflict with.
            yield (chosen | {one}) - problem.against[one]
    for out in chosen:
        for one in problem.groups:
            if one not in chosen:
                yield (chosen - {out} | {one}) - problem.against[one]
