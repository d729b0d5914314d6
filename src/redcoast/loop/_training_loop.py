"""The loop of `fit`: steps, evaluations, checkpoints, and the ways in which it ends."""

import contextlib
import functools as ft
import logging
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass

import jax

from ..checkpoint._checkpointer import Checkpointer
from ..core._errors import noting
from ..data._batches import Batch, Batches
from ..sharding import Plan
from ..tracking._metrics import MetricsReader, StackedMetrics
from ..train._state import TrainState
from ..train._weight_average import evaluated_model
from ._calls import Calls, StepCall, StepTaken
from ._early_stopping import SAVED, BestSoFar
from ._error_notes import DOUBTFUL, rescued
from ._evaluation import CompiledEvaluation
from ._nonfinite import explain_batch, explain_step, warn_of_clamped_indices
from ._run_settings import FUNCTIONS, SETTINGS, RunSettings
from ._stop import ASKED, StopRequest

logger = logging.getLogger("redcoast")

_TRIED = "Raised in the evaluation of one batch after the first step."


class Postponed(Exception):  # no error
    """Ends an evaluation that follows when the run is resumed."""


@dataclass
class TrainingLoop:
    """The parts of a run that is ready to train, and where it is.

    - `functions`: the checksums of the functions that change the results.
    - `is_due`: whether an evaluation of the last step is still to be made, since a run that a
        signal stops does not wait for it.
    """

    settings: RunSettings
    plan: Plan
    data: Batches
    calls: Calls
    evaluation: CompiledEvaluation | None
    best: BestSoFar | None  # the best evaluation so far, with early stopping
    checkpointer: Checkpointer
    reader: MetricsReader
    stopping: StopRequest  # whether a signal or a logger asks the run to stop
    functions: dict[str, str]
    is_due: bool = False
    done: StepTaken | None = None  # the last step of this run; `None` before the first
    _explains_nan: bool = True

    def run(self, state: TrainState) -> TrainState:
        """Trains until the data or the patience ends, or something asks to stop.

        Returns the state after the last step.
        """
        first = self.data.step + 1
        with contextlib.closing(self.data), self._rescued(DOUBTFUL):
            # An evaluation that a signal postponed before this run was resumed.
            if self.is_due and self.evaluation is not None:
                is_last = self.data.step == self.data.steps
                metrics = self._evaluate(
                    self.evaluation, self.data.step, state, may_postpone=not is_last
                )
                is_over = metrics is None or self._is_over
                if is_over or (self._is_asked_to_stop() and self.stopping()):
                    return state
            before: StepCall | None = None
            for call in self.calls(state, self._ends_call):
                done = self.done = call.last
                self.is_due = self._evaluates_after(done.batch)  # which a save after an error needs
                # Metrics are read later, when the devices have them; the host goes on to the next
                # call.
                self._push(call)
                if (step := self._step_to_stop_after(call, before)) is not None:
                    done = self.done = step
                    self.is_due = False
                # A logger may stop a run after a step of this call when the next one is under way.
                before = None
                if call.recompute is not None:
                    before = call
                is_first = done.number == first
                if is_first:  # while the devices take the step
                    training = self.settings.training
                    warn_of_clamped_indices(training, self.data, done.batch, done.state)
                if self._finish_step(done, is_first=is_first):
                    break
            # Waits for the last metrics, whose errors belong to the run.
            self.reader.flush()
        if self.done is None:
            return state
        return self.done.state

    def _finish_step(self, done: StepTaken, *, is_first: bool) -> bool:
        """Evaluates and saves after a step, if it is time; returns whether to stop."""
        is_last = done.batch.last
        self._is_asked_to_stop()  # with several processes, all of them agree on it in the next line
        stops = self.stopping(done.metrics.values) and not is_last
        # After a signal, a run does not wait for an evaluation; it follows on resumption.
        is_signal = stops and self.stopping.level > ASKED
        postpones = is_signal and not self.checkpointer.keeps_best
        metrics: dict[str, float] | None = {}
        if self.evaluation is not None and self.is_due and not postpones:
            may_postpone = not (is_last or self.checkpointer.keeps_best)
            metrics = self._evaluate(
                self.evaluation, done.number, done.state, may_postpone=may_postpone
            )
        if metrics is None:
            stops = postpones = True
            metrics = {}
        if (self._is_asked_to_stop() or self._is_over) and not is_last:
            stops = stops or self._is_over or self.stopping(done.metrics.values)
        if self.evaluation is not None and is_first and not (self.is_due or stops):
            with noting(_TRIED), self._rescued(doubtful=()):
                self.evaluation.try_loss(evaluated_model(done.state), done.state.key)
        self.is_due = self.is_due and postpones
        epoch_end = done.batch.epoch_end
        # What ends a run is always saved.
        if is_last or stops or self.checkpointer.wants(done.number, metrics, epoch_end=epoch_end):
            self._save(metrics)
        if stops and self.stopping.level > ASKED:
            of_steps = ""
            if self.data.steps is not None:
                of_steps = f" of {self.data.steps}"
            reason = self.stopping.reason
            logger.warning("Training stopped after step %d%s: %s.", done.number, of_steps, reason)
        return stops

    def _evaluates_after(self, batch: Batch) -> bool:
        every = None
        if self.evaluation is not None:
            every = self.evaluation.evaluation.every
        if every:
            return batch.last or batch.step % every == 0
        return batch.last or batch.epoch_end

    def _ends_call(self, batch: Batch) -> bool:
        """Whether the state after a step is needed: to evaluate it, to save it or to return it."""
        evaluates = self.evaluation is not None and self._evaluates_after(batch)
        saves = self.checkpointer.wants(batch.step, epoch_end=batch.epoch_end)
        # A call has only the state after its last step.
        return evaluates or saves or batch.last

    @property
    def _is_over(self) -> bool:
        """Whether early stopping ends the run."""
        return self.best is not None and self.best.is_over

    def _is_asked_to_stop(self) -> bool:
        """Whether a logger asked for it, and there are no other processes to agree with."""
        reason = self.reader.stop_reason
        if reason is None:
            return False
        self.stopping.ask(reason)
        # Several processes agree in `stopping`, at a step that is the same for all.
        return jax.process_count() == 1

    def _push(self, call: StepCall) -> None:
        """Passes the metrics of a call to the reader, with what explains a step that is skipped."""
        training, checkpoints = self.settings.training, self.settings.checkpoints
        explain = ft.partial(explain_step, training, self.plan, self.data, checkpoints)
        if isinstance(call.metrics, StackedMetrics):
            first = call.numbers[0]
            self.reader.push_call(
                call.numbers,
                call.metrics,
                explain=lambda number, trained: explain(call.step(number), trained),
                inspect=lambda number: explain_batch(self.data, call.batches[number - first]),
            )
            if self._ends_call(call.batches[-1]):
                self.reader.catch_up()
            return
        done = call.last
        state = None
        if self.reader.shows_state:
            state = done.state
        self.reader.push(
            done.number,
            call.metrics,
            explain=ft.partial(explain, done),
            inspect=ft.partial(explain_batch, self.data, done.batch),
            state=state,
        )

    def _step_to_stop_after(self, call: StepCall, before: StepCall | None) -> StepTaken | None:
        """The step after which a logger stops the run, if more steps were dispatched since.

        A logger is called when the next step has been dispatched, and so the run ends after that
        one, however many steps a call takes. Several processes, whose calls take one step each, go
        on until they agree in `stopping`.
        """
        if self.reader.stop_step is None or jax.process_count() > 1:
            return None
        number = self.reader.stop_step + 1
        if number >= call.numbers[-1]:
            return None
        # Later steps were dispatched before the logger had seen this one, and are undone.
        self.reader.forget_after(number)
        if number in call.numbers:
            return call.step(number)
        assert before is not None
        return before.step(number)

    def _evaluate(
        self, evaluation: CompiledEvaluation, number: int, state: TrainState, *, may_postpone: bool
    ) -> dict[str, float] | None:
        """Evaluates the state after a step, and logs the metrics; `None` if a signal ended it.

        An evaluation may take longer than a scheduler waits after its signal.
        """
        # Several processes would have to agree after each batch.
        may_postpone = may_postpone and jax.process_count() == 1
        note = f"Raised in the evaluation after step {number}."
        model = evaluated_model(state)
        with (
            self.reader.paused(evaluation.batches) as advance,
            noting(note),
            self._rescued(doubtful=()),
        ):

            def count_batch() -> None:
                advance()
                if may_postpone and self.stopping() and self.stopping.level > ASKED:
                    raise Postponed

            try:
                metrics = evaluation(model, state.key, advance=count_batch)
            except Postponed:
                return None
            if self._explains_nan and math.isnan(metrics.get("loss", 0.0)):
                # Once in a run: an explanation reads all examples again.
                self._explains_nan = False
                evaluation.explain_nan(model)
        if self.best is not None:
            self.best.see(metrics, number, state)
        logged = {f"eval/{name}": value for name, value in metrics.items()}
        self.reader.write(logged, number, state=state)
        return metrics

    def _save(self, metrics: dict[str, float]) -> None:
        """Saves the state after the last step."""
        if self.done is None:
            return
        self.reader.flush()
        # Where the data is after this step, and not where it was read ahead to.
        saved = {**self.data.gather_state(self.done.batch.state), "due": self.is_due}
        saved[SETTINGS] = self.settings.of_results
        saved[FUNCTIONS] = self.functions
        if self.best is not None:
            saved[SAVED] = self.best.saved
        self.checkpointer.save(self.done.number, self.done.state, saved, metrics)

    def _rescued(self, doubtful: tuple[type[Exception], ...]) -> AbstractContextManager[None]:
        """Saves the state if a function of the user raises."""

        def last_state() -> TrainState | None:
            if self.done is None:
                return None
            return self.done.state

        return rescued(self.reader, last_state, self._save, doubtful=doubtful)
