"""Concurrent requests, which one thread generates in batches."""

import functools as ft
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from ..core._decoding import Decoding
from ..core._iterate import with_last
from ..generate._logits import ALL_EXCLUDED, INVALID
from ..generate._prefill import slots_for
from ..generate._request import Request, make_request
from ._decode_rows import Scores, decode_rows
from ._detokenize import Text
from ._grammar import Grammar, allowed_bits
from ._row_options import ALL_TOKENS, RowOptions, ends_of, greedy_rows, shared_decoding

LOWEST = -9999.0  # of log-probabilities, as in OpenAI's API
LEAST = 32  # the minimum room for prompts and for answers, in tokens; larger ones are powers of two


@dataclass(frozen=True)
class Scored:
    """A token with its log-probability (None for the first token of a prompt), and the most likely
    tokens at its position with their log-probabilities."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Piece:
    """New text of one row of a job, the reason why the row ended, if it did, the number of its
    tokens so far, and the new tokens, if their log-probabilities are requested."""

    row: int
    text: str
    finish: str | None
    count: int
    scored: tuple[Scored, ...] = ()


@dataclass(frozen=True)
class Extras:
    """The options of a job besides its decoding.

    - `presence`, `frequency`: penalties of tokens that occur in the answer, once and per
        occurrence.
    - `bias`: values that are added to the logits of tokens.
    - `logprobs`: the number of most likely tokens to return with each token; None for no
        log-probabilities.
    - `echo`: the texts of the prompts, which precede the answers (None for a prompt of tokens);
        None to return only answers.
    - `grammar`: creates the grammar that an answer must match.
    """

    presence: int | float = 0.0
    frequency: int | float = 0.0
    bias: Mapping[int, int | float] = field(default_factory=dict)
    logprobs: int | None = None
    echo: tuple[str | None, ...] | None = None
    grammar: Callable[[], Grammar] | None = None


@dataclass(frozen=True, eq=False)
class ServedJob:
    """Prompts to continue by at most `new_tokens` tokens, one row each.

    `send` gets each `Piece`, or the error that ended the job. Once `cancelled` is set, the answer
    is no longer needed. `continues` is true if the text continues the prompt, as in a completion,
    and false if it is a separate answer.
    """

    prompts: list[list[int]]
    new_tokens: int
    decoding: Decoding
    seed: int | None
    stops: tuple[str, ...]
    send: Callable[[Piece | Exception], object]
    cancelled: threading.Event = field(default_factory=threading.Event)
    continues: bool = False
    extras: Extras = Extras()

    @property
    def alike(self) -> Decoding:
        """A value that is equal for jobs that can share a batch."""
        return shared_decoding(self.decoding)


@dataclass(frozen=True)
class Served:
    """A model, its tokenizer, and its limits."""

    model: PyTree
    tokenizer: Any
    rows: int  # the maximum number of rows of a batch, `multiple` times a power of two
    multiple: int
    context: int  # the maximum number of tokens of a prompt and its answer
    seed: int = 0  # the seed of requests without a seed


class Queue:
    """Jobs that wait for the thread, with at most `most` rows."""

    def __init__(self, most: int, rows: int, context: int):
        self.most, self.rows, self.context = most, rows, context
        self.jobs: list[ServedJob] = []
        self.changed = threading.Condition()
        self.closed = False
        self.seconds: deque[float] = deque(maxlen=9)  # durations of the latest batches

    def full(self) -> bool:
        """Whether there is no room for any job."""
        with self.changed:
            return self.closed or self._waiting() >= self.most

    def put(self, job: ServedJob) -> bool:
        """Adds a job. Returns false if there is no room for it."""
        with self.changed:
            if self.closed or self._waiting() + len(job.prompts) > self.most:
                return False
            self.jobs.append(job)
            # Wakes the thread in `take`.
            self.changed.notify()
            return True

    def take(self, wait: int | float) -> list[ServedJob]:
        """Waits for a job, and `wait` seconds for others; returns the oldest and all jobs that can
        share its batch. Returns an empty list once the queue is closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.jobs or self.closed)
            # A full batch does not wait.
            self.changed.wait_for(lambda: self._waiting() >= self.rows or self.closed, wait)
            # Later jobs that fit may overtake one that does not. It is the first of the next batch.
            batch: list[ServedJob] = []
            left: list[ServedJob] = []
            for job in self.jobs:
                # Its client has gone, so nobody waits for the answer.
                if job.cancelled.is_set():
                    continue
                if self._fit([*batch, job]):
                    batch.append(job)
                else:
                    left.append(job)
            self.jobs = left
            return batch

    def _fit(self, jobs: list[ServedJob]) -> bool:
        """Whether jobs can share a batch, whose rows are all as long as the longest one."""
        rows = longest_prompt = most_new = 0
        for job in jobs:
            if job.alike != jobs[0].alike:
                return False
            rows += len(job.prompts)
            longest_prompt = max(longest_prompt, *map(len, job.prompts))
            most_new = max(most_new, job.new_tokens)
        return rows <= self.rows and longest_prompt + most_new <= self.context

    def close(self) -> None:
        """Ends the thread after its batch, and rejects waiting jobs."""
        with self.changed:
            self.closed, left, self.jobs = True, self.jobs, []
            self.changed.notify()
        for job in left:
            job.send(RuntimeError("The server is being shut down."))

    def retry_after(self) -> int:
        """The seconds after which a batch of the waiting jobs is likely to be finished."""
        with self.changed:
            # The minimum, because the others may include a compilation. A client that returns too
            # early is asked to wait again.
            return math.ceil(min(self.seconds, default=1))

    def _waiting(self) -> int:
        return sum(len(job.prompts) for job in self.jobs)


def answer_queue(served: Served, queue: Queue, wait: int | float) -> None:
    """Generates the answers to the jobs in the queue, batch by batch, until it is closed."""
    random = np.random.default_rng(served.seed)
    while not queue.closed:
        if not (jobs := queue.take(wait)):
            continue
        began = time.monotonic()
        answer_batch(served, jobs, random)
        queue.seconds.append(time.monotonic() - began)


def answer_batch(served: Served, jobs: Sequence[ServedJob], random: np.random.Generator) -> None:
    """Answers jobs in one batch. If this fails before an answer has begun, each job is tried alone,
    so that the error of one job does not end the others."""
    rows: list[AnswerRow] = []
    for job in jobs:
        own: list[AnswerRow] = []
        seeds = random.integers(2**32, size=len(job.prompts)).tolist()
        try:
            for index, seed in enumerate(seeds):
                number = 0
                if job.seed is not None:
                    seed, number = job.seed, index  # rows of one seed differ by their numbers
                # A grammar may fail to compile, which is the mistake of this job alone.
                own.append(AnswerRow(job, index, served, seed, number))
            rows += own
        except BaseException as error:
            job.send(as_exception(error))
    try:
        if rows:
            generate_rows(served, rows)
    except BaseException as error:
        for job in jobs:
            # A job that has sent text cannot begin again. One that failed alone would fail again.
            own = [row for row in rows if row.job is job]
            if all(row.ended for row in own):
                continue
            if len(jobs) == 1 or any(row.began for row in own):
                job.send(as_exception(error))
            else:
                answer_batch(served, [job], random)


def as_exception(error: BaseException) -> Exception:
    """Converts an error to an `Exception`. `tokenizers` panics with another class, and the thread
    must continue."""
    if isinstance(error, Exception):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


class AnswerRow:
    """One row of a batch: sends its text until it ends."""

    def __init__(self, job: ServedJob, index: int, served: Served, seed: int, number: int):
        self.job, self.index = job, index
        self.seed, self.number = seed, number
        self.prompt = job.prompts[index]
        self.ends = ends_of(job.decoding, served.model.config)
        before = []
        # The text continues the prompt's, whose last token may decide whether a space comes first.
        if job.continues:
            before = self.prompt
        self.decode = served.tokenizer.decode
        self.text = Text(self.decode, job.stops, before)
        self.grammar = None
        if job.extras.grammar is not None:
            self.grammar = job.extras.grammar()
        self.count, self.finish = 0, None
        self.began = self.failed = False
        self.scored: list[Scored] = []

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.failed or self.job.cancelled.is_set()

    def write_options(self, options: RowOptions, row: int) -> None:
        """Writes the options of a client into those of the batch. All others are the server's."""
        decoding, extras = self.job.decoding, self.job.extras
        # Samples depend only on the seed, the number and the step. Seeds of the API have 64 bits
        # and a sign, and those of the program 32.
        options.seeds[row] = self.seed % 2**32
        options.numbers[row] = self.number
        options.temperature[row] = decoding.temperature
        options.top_k[row] = min(decoding.top_k or ALL_TOKENS, ALL_TOKENS)
        options.tail[row] = 1 - (decoding.top_p or 1)
        options.min_p[row] = decoding.min_p or 0
        options.repetition[row] = decoding.repetition_penalty
        options.presence[row] = extras.presence
        options.frequency[row] = extras.frequency
        options.bias_tokens[row, : len(extras.bias)] = [*extras.bias.keys()]
        options.bias[row, : len(extras.bias)] = [*extras.bias.values()]
        options.least[row] = max(decoding.min_new_tokens, decoding.min_length - len(self.prompt))
        options.ends[row, : len(self.ends)] = self.ends
        options.logprobs[row] = extras.logprobs is not None

    def echo(self, scored: Sequence[Scored]) -> None:
        """Sends the prompt, and ends if no new tokens are requested."""
        texts = self.job.extras.echo
        if texts is None or self.ended:
            return
        if self.job.new_tokens == 0:
            self.finish = "length"
        text = texts[self.index]
        if text is None:
            text = self.decode(self.prompt, skip_special_tokens=False)
        self._send(text, scored)

    def add(self, token: int, scored: Scored | None = None) -> None:
        """Adds the row's next token."""
        if self.ended:
            return
        try:
            self._add(token, scored)
        except BaseException as error:
            # The other jobs of the batch continue.
            self.failed = True
            self.job.send(as_exception(error))
            # So that the other rows of the job end too.
            self.job.cancelled.set()

    def _add(self, token: int, scored: Scored | None) -> None:
        if token == INVALID:
            raise ValueError(
                f"The logits of choice {self.index} hold NaN at new token {self.count}. The "
                "parameters may hold NaN, or activations may overflow in their dtype."
            )
        if token == ALL_EXCLUDED:
            raise ValueError(
                f"All tokens are excluded for choice {self.index} at new token {self.count}. Pass "
                "options of decoding that leave some."
            )
        self.count += 1
        if scored is not None:
            self.scored.append(scored)
        text, end = "", token in self.ends
        if not end:
            text = self.text.add(token)  # empty as long as it may be part of a stop
            if self.grammar is not None:
                self.grammar.take(token)
                end = self.grammar.done
        last = end or self.text.stopped or self.count >= self.job.new_tokens
        if last and not self.text.stopped:
            text += self.text.rest()  # in which there may be a stop
        if end or self.text.stopped:
            self.finish = "stop"
        elif last:
            self.finish = "length"
        if last or text or self.scored:
            self._send(text, self.scored)

    def _send(self, text: str, scored: Sequence[Scored]) -> None:
        self.began, self.scored = True, []
        self.job.send(Piece(self.index, text, self.finish, self.count, tuple(scored)))


def generate_rows(served: Served, rows: Sequence[AnswerRow]) -> None:
    config = served.model.config
    prompts = [row.prompt for row in rows]
    tokens, mask = pad_prompts(prompts, served)  # (count, length)
    count = len(tokens)
    options = greedy_rows(count)
    limits = np.ones(count, np.int32)  # of rows of padding, too
    for i, row in enumerate(rows):
        row.write_options(options, i)
        limits[i] = max(row.job.new_tokens, 1)
    # Rounded up, so that few programs are compiled: rows end by themselves.
    longest = next_power(int(limits.max()), LEAST)
    steps_at_most = max(min(longest, served.context - max(map(len, prompts))), 1)
    room = slots_for(served.model, tokens.shape[1], steps_at_most)
    request = shared_request(config, rows[0].job.decoding)
    request = replace(request, limit=limits, room=room)
    echoes = [row for row in rows if row.job.extras.echo is not None]
    grammars = [row.grammar for row in rows]
    allow = None
    if any(grammar is not None for grammar in grammars):
        allow = ft.partial(allowed_bits, grammars, config.vocab, count)
    steps = decode_rows(
        served.model,
        tokens,
        mask,
        request,
        options,
        steps_at_most,
        score_prompt=any(row.job.extras.logprobs is not None for row in echoes),
        allow=allow,
    )
    if allow is None:
        # The next step runs while the tokens of the last one are read. A grammar needs them first.
        steps = (step for step, _ in with_last(steps))
    for number, (progress, of_prompt) in enumerate(steps):
        if number == 0 and echoes:
            show_prompts(rows, jax.device_get(of_prompt))
        # One transfer for all rows.
        chosen, scores = jax.device_get((progress.tokens, progress.scores))
        for i, row in enumerate(rows):  # without the padding rows
            token = int(chosen[i])
            row.add(token, score_of(row, token, scores, i))
        # Limits are rounded up, so the program would go on.
        if all(row.ended for row in rows):
            break


def shared_request(config: PyTree, decoding: Decoding) -> Request:
    """The options of a decoding that are part of a batch's program."""
    shared = shared_decoding(decoding)
    return make_request(config, shared, max_new_tokens=1, room=1, decoder_only=True, key=None)


def show_prompts(rows: Sequence[AnswerRow], scores: Scores) -> None:
    """Sends the prompts of rows that echo them."""
    for i, row in enumerate(rows):
        if row.job.extras.echo is None:
            continue
        scored: list[Scored] = []
        if row.job.extras.logprobs is not None:
            begin = scores.chosen.shape[1] - len(row.prompt)  # prompts end in the last column
            scored.append(Scored(row.prompt[0], None, ()))
            for place, token in enumerate(row.prompt[1:], begin):
                score = score_of(row, token, scores, (i, place))
                if score is not None:
                    scored.append(score)
        row.echo(scored)


def score_of(
    row: AnswerRow, token: int, scores: Scores, place: int | tuple[int, int]
) -> Scored | None:
    """The score of a token at a position of the arrays, if the row requests it."""
    count = row.job.extras.logprobs
    if count is None or row.ended:
        return None
    # JSON has no infinity.
    values = [max(value, LOWEST) for value in scores.top[place].tolist()]
    top = zip(scores.top_tokens[place].tolist(), values, strict=True)
    return Scored(token, max(float(scores.chosen[place]), LOWEST), tuple(top)[:count])


def pad_prompts(prompts: list[list[int]], served: Served) -> tuple[np.ndarray, np.ndarray]:
    """Returns the prompts as tokens and mask, in one of a few numbers of rows. Padding rows have
    one token."""
    # A multiple of the number of devices that rows are split over.
    count = next_power(len(prompts), served.multiple)
    length = max(map(len, prompts))
    tokens, mask = np.zeros((count, length), np.int32), np.zeros((count, length), bool)
    mask[:, -1] = True  # a row without any token would have nothing to attend to
    for row, prompt in enumerate(prompts):
        tokens[row, length - len(prompt) :] = prompt
        mask[row, length - len(prompt) :] = True
    return tokens, mask


def next_power(least: int, unit: int) -> int:
    """The smallest of `unit`, 2 `unit`, 4 `unit`, ... that is at least `least`."""
    return unit * 2 ** max(0, math.ceil(math.log2(least / unit)))
