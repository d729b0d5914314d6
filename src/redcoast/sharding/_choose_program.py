"""Chooses the program to plan, and the layout of its arrays.

A batch is split by its rows. Where these do not divide, or a step does not fit into memory,
programs whose examples are split are compared too, by memory and then by time.
"""

import functools as ft
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..distributed._mesh import BATCH_AXES
from ._mesh_axes import parts
from .program._batch import Split
from .program._program import Program
from .solver._layout import StorageLayout, is_large
from .solver._memory_estimate import excess_bytes, fit_budget
from .solver._replicate import replicate
from .solver._split_examples import (
    apply_split,
    constrained_split,
    example_parts,
    is_sequence,
    needs_split,
    split_tokens,
    splits_of_one,
    splits_of_two,
    trace_in_parts,
)
from .solver._strategy import Decision, PlanTask, best_strategy


@dataclass(frozen=True)
class PlanCandidate:
    """A program, and the layout of its arrays."""

    task: PlanTask
    layout: StorageLayout

    @ft.cached_property
    def excess(self) -> int | float:
        """Bytes per device by which it does not fit into memory."""
        return excess_bytes(self.layout, self.task.memory, self.task.state_bytes)

    @property
    def order(self) -> tuple[int | float, int | float]:
        """Less is better: first what does not fit into memory, then seconds."""
        return self.excess, self.layout.decision.seconds


def choose_candidate(
    task: PlanTask, budget: int | None, trace_program: Callable[[], Program]
) -> PlanCandidate:
    """The cheapest plan that splits the batch by rows, if they divide and a step fits into memory,
    or else along dimensions of its examples.

    `trace_program` traces the program again, whose attention may depend on the number of parts.
    """
    program, axes = task.program, task.axes
    count = parts(BATCH_AXES, axes)

    @ft.lru_cache(None)  # a trace takes longer than the search
    def in_parts(number: int) -> Program:
        if number == 1:
            return program
        return trace_in_parts(number, trace_program)

    def tasks_of(splits: Iterable[Split]) -> Iterator[PlanTask]:
        for split in splits:
            applied = apply_split(in_parts(example_parts(split, axes)), split, axes)
            if applied is not None:
                yield replace(task, program=applied)

    # A constraint of the program's own on its batch is obeyed.
    if split := constrained_split(program, axes):
        constrained = list(tasks_of([split]))
        if not constrained:
            raise ValueError(_cannot_split(program, split, axes))
        return cheapest_layout(constrained, budget)
    with_split_examples = tasks_of(splits_of_one(in_parts, axes))
    # Rows divide: split examples are tried only if activations do not fit.
    if not needs_split(program, count):
        by_rows = cheapest_layout([task], budget)
        if not by_rows.excess:
            return by_rows
        best = cheapest_layout(with_split_examples, budget, beside=[by_rows])
        # Where nothing fits, the price of a usual plan decides.
        if best.excess:
            return by_rows
        return best
    # Rows do not divide: they are split over fewer axes, if any, or examples are split.
    by_tokens = split_tokens(program, count, lambda: in_parts(count))
    why_whole = by_tokens.batch.why_whole or "it would cost more"
    unsplit = replace(program, batch=replace(program.batch, why_whole=why_whole))
    tasks = [replace(task, program=unsplit)]
    if is_sequence(by_tokens, count):
        # Tokens and rows are compared by their costs.
        tasks.append(replace(task, program=by_tokens))
    best = cheapest_layout([*tasks, *with_split_examples], budget)
    if best.excess:
        # Two dimensions at once are many candidates, so they are tried last.
        pairs = tasks_of(splits_of_two(in_parts, axes))
        best = cheapest_layout(pairs, budget, beside=[best])
    return best


def _cannot_split(program: Program, split: Split, axes: Mapping[str, int]) -> str:
    listed: list[str] = []
    for over, places in split:
        for place, d in places:
            size = program.batch_arrays[place].shape[d]
            listed.append(
                f"dimension {d} of array {place}, of size {size}, over {' x '.join(over)} = "
                f"{parts(over, axes)}"
            )
    return (
        f"The function constrains its batch to be split along {'; '.join(listed)}. That does not "
        "divide, or the dimension belongs to parameters, or an operation needs all of it. Split "
        "another dimension, or leave the constraint out, and the plan chooses."
    )


def cheapest_layout(
    tasks: Iterable[PlanTask], budget: int | None, *, beside: Sequence[PlanCandidate] = ()
) -> PlanCandidate:
    """The cheapest plan of those that fit into memory, of tasks and of plans that were made."""
    planned = list(beside)
    errors: list[ValueError] = []
    for task in tasks:
        try:
            planned.append(_lay_out(task, budget))
        except ValueError as error:
            errors.append(error)
    if not planned:  # neither is within the budget
        raise errors[-1]
    return min(planned, key=lambda candidate: candidate.order)


def _lay_out(task: PlanTask, budget: int | None) -> PlanCandidate:
    """The layout within the budget; if memory is known, arrays are replicated where it suffices."""
    program, axes, state_bytes = task.program, task.axes, task.state_bytes
    large = [is_large(program, value) for value in program.parameters]

    def make(stored_in_parts: Sequence[bool]) -> StorageLayout:
        """The layout if some arrays are FSDP-sharded whatever that costs."""

        @ft.cache  # with its activations
        def lay_out(decision: Decision) -> StorageLayout:
            decision = replace(decision, pipeline=task.pipeline)
            return StorageLayout(
                decision, stored_in_parts, task.overrides, task.updated, accumulate=task.accumulate
            )

        def excess(decision: Decision) -> int | float:
            return excess_bytes(lay_out(decision), task.memory, state_bytes)

        return lay_out(best_strategy(task, stored_in_parts, excess))

    if budget is not None:
        layout = fit_budget(make, large, program, axes, budget, state_bytes)
        return PlanCandidate(task, layout)
    layout = make(large)
    if task.hardware.memory is not None:
        # Memory that is only assumed, as for an abstract mesh, may not be there.
        layout = replicate(layout, task.memory, state_bytes)
    return PlanCandidate(task, layout)
