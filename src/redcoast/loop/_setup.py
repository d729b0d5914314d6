"""What a run does before its first step: a try of the evaluation, and words to the user."""

import logging

from ..checkpoint._policy import Checkpoints
from ..core._errors import noting
from ..data._position import Course
from ..distributed._kv_store import is_main
from ..distributed._mesh import batch_shards
from ..sharding import Plan
from ..tracking._run import RunInfo, code_version, say
from ..train._step import TrainState
from ._validation import Validation

logger = logging.getLogger("redcoast")


def check_eval_every(eval_every: int | None, validation: Validation | None) -> None:
    if eval_every is not None and validation is None:
        raise ValueError("`eval_every` needs something to evaluate on; pass `eval_examples` too.")
    if eval_every is not None and eval_every < 1:
        raise ValueError(f"`eval_every` is {eval_every}. Evaluate every step at the most.")


def rehearse(
    validation: Validation | None, state: TrainState, checkpoints: Checkpoints | None
) -> None:
    """Evaluates one batch, so that a mistake there shows before an epoch is spent."""
    names = []
    if validation is not None:
        with noting("Raised in the evaluation of one batch before the first step."):
            metrics = validation(state.model, state.key, rehearsal=True)
        names = [name.removeprefix("eval/") for name in metrics]
    if checkpoints and checkpoints.best is not None and checkpoints.metric not in names:
        raise ValueError(
            f"`Checkpoints(best={checkpoints.best!r})` is no metric of the evaluation, which has "
            f"{', '.join(names) or 'none, for want of `eval_examples`'}."
        )


def warn_of_repeats(course: Course, batch_size: int) -> None:
    """Warns of batches that must hold some examples several times."""
    if course.length is None or course.last_position is None or not is_main():
        return
    rows = min(batch_size, course.last_position - course.position)
    if rows > course.length:
        logger.warning(
            "`batch_size=%d` is more than the %d examples that there are: a batch spans epochs, "
            "and holds examples several times. Pass at most %d, or more examples.",
            *(batch_size, course.length, course.length),
        )


def announce(plan: Plan, course: Course, resumed: bool, batch_size: int) -> None:
    """Prints how the model is split, and what a user should know of the run."""
    say(str(plan))
    shards = batch_shards(plan.mesh)
    if resumed:
        say(f"Resumed at step {course.step}.")
    if course.last_step is not None and course.step >= course.last_step:
        say(f"Nothing is left to train: {course.step} of {course.last_step} steps are done.")
    rest = (course.last_position or 0) - course.position
    if rest > 0 and rest % batch_size % shards and batch_size % shards == 0:
        say(
            f"The last batch, of {rest % batch_size}, does not divide over data x fsdp = {shards} "
            "devices, so that each computes all of it."
        )
    if batch_size % shards:
        say(
            f"A batch of {batch_size} does not divide over data x fsdp = {shards} devices, so that "
            f"each computes all of it. A multiple of {shards} would be split."
        )


def run_info(
    checkpoints: Checkpoints | None, resumed: bool, plan: Plan, batch_size: int
) -> RunInfo:
    directory = checkpoints.path.parent if checkpoints else None
    config = {
        "batch_size": batch_size,
        "mesh": dict(plan.mesh.shape),
        "versions": code_version(),
    }
    return RunInfo(directory=directory, resumed=resumed, plan=str(plan), config=config)
