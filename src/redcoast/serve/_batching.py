"""Requests that come together, generated together by one thread."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from _detokenize import Text

import redcoast as rc

LEAST = 32  # the least room for prompts and for answers, in tokens; more are powers of two


@dataclass(frozen=True)
class Piece:
    """New text of one row of a job, why the row ended, if it did, and its tokens so far."""

    row: int
    text: str
    finish: str | None
    count: int


@dataclass(frozen=True, eq=False)
class Job:
    """Prompts to continue by at most `new_tokens` tokens, one row each.

    `send` gets each `Piece`, or the error that ended the job. Once `cancelled` is set, nobody
    waits for the answer. `continues` says that the text goes on after that of the prompt, as of a
    completion, and is not an answer of its own.
    """

    prompts: list[list[int]]
    new_tokens: int
    decoding: rc.Decoding
    seed: int | None
    stops: tuple[str, ...]
    send: Callable[[Piece | Exception], Any]
    cancelled: threading.Event = field(default_factory=threading.Event)
    continues: bool = False

    @property
    def alike(self) -> Any:
        """Equal for jobs that can share a batch. Samples of a seed depend on their rows' places."""
        seeded = self.seed is not None and self.decoding.temperature > 0
        return id(self) if seeded else self.decoding


@dataclass(frozen=True)
class Served:
    """A model, its tokenizer, and how much it takes at once.

    - `rows`: the most rows of a batch, a multiple of `multiple` times a power of two.
    - `context`: the most tokens of a prompt and its answer.
    """

    model: Any
    tokenizer: Any
    rows: int
    multiple: int
    context: int
    key: Any


class Queue:
    """Jobs that wait for the thread, at most `most` rows of them."""

    def __init__(self, most: int, rows: int, context: int):
        self.most, self.rows, self.context = most, rows, context
        self.jobs: list[Job] = []
        self.changed = threading.Condition()
        self.closed = False
        self.seconds: deque[float] = deque(maxlen=9)  # that the latest batches took

    def put(self, job: Job) -> bool:
        """Adds a job. Returns false if there is no room for it."""
        with self.changed:
            if self.closed or self._waiting() + len(job.prompts) > self.most:
                return False
            self.jobs.append(job)
            self.changed.notify()
            return True

    def take(self, wait: float) -> list[Job]:
        """Waits for a job, and `wait` seconds for others; returns the oldest and those that can
        share its batch. Returns none once the queue is closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.jobs or self.closed)
            self.changed.wait_for(lambda: self._waiting() >= self.rows or self.closed, wait)
            self.jobs = [job for job in self.jobs if not job.cancelled.is_set()]
            batch: list[Job] = []
            for job in () if self.closed else self.jobs:
                if self._fit([*batch, job]):
                    batch.append(job)
            self.jobs = [job for job in self.jobs if job not in batch]
            return batch

    def _fit(self, jobs: list[Job]) -> bool:
        """Whether jobs can share a batch, whose rows are all as long as the longest."""
        longest = max(len(prompt) for job in jobs for prompt in job.prompts)
        length = longest + max(job.new_tokens for job in jobs)
        few = sum(len(job.prompts) for job in jobs) <= self.rows
        return few and length <= self.context and all(job.alike == jobs[0].alike for job in jobs)

    def close(self) -> None:
        """Ends the thread after its batch, and refuses what waits."""
        with self.changed:
            self.closed, left, self.jobs = True, self.jobs, []
            self.changed.notify()
        for job in left:
            job.send(RuntimeError("The server is being shut down."))

    def retry_after(self) -> int:
        """The seconds after which a batch's worth of the jobs that wait is likely done."""
        with self.changed:
            # The least: the others may have compiled a program. Who comes too early is told again.
            return math.ceil(min(self.seconds, default=1))

    def _waiting(self) -> int:
        return sum(len(job.prompts) for job in self.jobs)


def work(served: Served, queue: Queue, wait: float) -> None:
    """Generates what is in the queue, batch by batch, until it is closed."""
    number = 0
    while not queue.closed:
        if not (jobs := queue.take(wait)):
            continue
        began, number = time.monotonic(), number + 1
        try:
            generate(served, jobs, jax.random.fold_in(served.key, number))
        except Exception as error:  # belongs to these requests; the next ones may succeed
            for job in jobs:
                job.send(error)
        queue.seconds.append(time.monotonic() - began)


class Row:
    """One row of a batch: sends its text until it ends."""

    def __init__(self, job: Job, index: int, served: Served, ends: tuple[int, ...]):
        self.job, self.index, self.ends = job, index, ends
        before = job.prompts[index] if job.continues else []
        self.text = Text(served.tokenizer.decode, job.stops, before)
        self.count, self.finish = 0, None

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.job.cancelled.is_set()

    def add(self, token: int) -> None:
        """Takes the row's next token."""
        if self.ended:
            return
        self.count += 1
        end = token in self.ends
        text = "" if end else self.text.add(token)
        if not end and not self.text.stopped and self.count < self.job.new_tokens:
            if text:
                self.job.send(Piece(self.index, text, None, self.count))
            return
        text += "" if self.text.stopped else self.text.rest()
        self.finish = "stop" if end or self.text.stopped else "length"
        self.job.send(Piece(self.index, text, self.finish, self.count))


def generate(served: Served, jobs: Sequence[Job], key: Any) -> None:
    """Generates one batch."""
    first = jobs[0]
    prompts = [prompt for job in jobs for prompt in job.prompts]
    tokens, mask = pad(prompts, served)
    ends: Any = served.model.config.eos if first.decoding.eos is None else first.decoding.eos
    rows = [Row(job, i, served, tuple(ends)) for job in jobs for i in range(len(job.prompts))]
    # Rounded up, so that few programs are compiled: rows end by themselves.
    room = served.context - max(map(len, prompts))
    new = min(power(max(job.new_tokens for job in jobs), LEAST), room)
    if first.seed is not None:
        key = jax.random.key(first.seed % 2**32)

    def stream(step: np.ndarray) -> None:
        for row, token in zip(rows, step.tolist(), strict=False):  # there are rows of padding
            row.add(token)

    rc.generate(
        served.model,
        tokens,
        mask=mask,
        max_new_tokens=new,
        key=key if first.decoding.temperature > 0 else None,
        decoding=first.decoding,
        stream=stream,
        stop=lambda _: all(row.ended for row in rows),
    )


def pad(prompts: list[list[int]], served: Served) -> tuple[np.ndarray, np.ndarray]:
    """Returns the prompts as tokens and mask, in one of a few shapes. Rows of padding have one
    token."""
    count = power(len(prompts), served.multiple)
    length = min(power(max(map(len, prompts)), LEAST), served.context)
    tokens, mask = np.zeros((count, length), np.int32), np.zeros((count, length), bool)
    mask[:, -1] = True
    for row, prompt in enumerate(prompts):
        tokens[row, length - len(prompt) :] = prompt
        mask[row, length - len(prompt) :] = True
    return tokens, mask


def power(least: int, unit: int) -> int:
    """The smallest of `unit`, 2 `unit`, 4 `unit`, ... that is at least `least`."""
    return unit * 2 ** max(0, math.ceil(math.log2(least / unit)))
