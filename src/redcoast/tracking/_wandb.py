"""A logger for Weights & Biases that neither stops nor delays the loop."""

import contextlib
import dataclasses
import functools as ft
import html
import json
import logging
import netrc
import os
import secrets
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ..core._errors import check_integer, check_kind, check_number
from ..core._output import say
from ._loggers import Metrics, RunInfo, code_version, join_run, plain_config, plain_data
from ._service_thread import ServiceThread
from ._terminal import show_directory

_log = logging.getLogger("redcoast")


class WandbLogger:
    """The logger that `wandb_logger` creates."""

    wants_rates = True

    def __init__(
        self,
        options: dict[str, Any],
        close_timeout: int | float,
        queue_size: int,
        *,
        session: Any = None,
    ):
        self._options = options
        self._is_callers = session is not None  # who finishes it
        self._session = session  # a W&B run
        self._run: RunInfo | None = None  # the run that W&B has been informed of
        self._refused = False  # whether W&B could not store some metrics
        self._exit_code = 0
        self._thread = ServiceThread(
            "W&B",
            self._finish,
            close_timeout=close_timeout,
            queue_size=queue_size,
            give_up=_skip_exit_hook,
        )

    def start(self, run: RunInfo) -> None:
        """Starts a W&B run in a thread; otherwise, the first call of the logger does so."""
        if self._run is run:
            return
        self._run = run
        if self._thread.is_open:
            # Earlier metrics belong to the same W&B run.
            self._thread.put_always(ft.partial(self._add_run, run))
            return
        self._exit_code = 0
        self._thread.open(ft.partial(self._begin, run))

    def __call__(self, metrics: Metrics, step: int) -> None:
        run = join_run(self)
        if run is not None:
            self.start(run)
        elif not self._thread.is_open:
            self.start(RunInfo())
        entry: dict[str, object] = {**metrics, "step": step}
        for name, value in metrics.items():
            if isinstance(value, np.ndarray):
                # The caller may write into it before W&B reads it.
                entry[name] = value.copy()
        self._thread.put(ft.partial(self._send, entry))

    def fail(self, error: BaseException) -> None:
        """Marks the W&B run as failed when it is closed."""
        self._exit_code = 1

    def close(self) -> None:
        """Waits at most `close_timeout` seconds until W&B has received everything."""
        # The next call starts a new W&B run.
        self._run = None
        self._thread.close()

    def _begin(self, run: RunInfo) -> None:
        import wandb

        settings = wandb.setup().settings
        if self._thread.has_given_up:
            _skip_exit_hook()
            raise TimeoutError("Importing W&B took longer than `close` waits.")
        # W&B has its own exit hook.
        self._thread.close_first_at_exit()
        options, defaults = dict(self._options), {}
        is_chosen = "mode" in options or "WANDB_MODE" in os.environ
        mode = options.get("mode") or settings.mode
        # W&B would ask for an account: without a terminal it fails, and on one it waits for
        # an answer, with which Python ends in an abort.
        lacks_account = mode == "online" and not has_account(settings)
        if lacks_account and (not is_chosen or _has_terminal()):
            options["mode"] = "offline"
        if wandb.run is not None:
            # Otherwise W&B would return the run of somebody else, and finish it.
            defaults["reinit"] = "create_new"
        if self._is_callers:
            # The caller's own run may have values of the same names.
            self._session.config.update(self._options["config"], allow_val_change=True)
            self._add_run(dataclasses.replace(run, resumed=False))
        else:
            self._session = wandb.init(**_init_arguments(options, run, defaults))
            self._thread.hint = self._announce(has_account=not lacks_account)
            _show_plan(self._session, run)
        # W&B's own step can only increase, but a resumed run repeats steps.
        self._session.define_metric("step")
        self._session.define_metric("*", step_metric="step")

    def _finish(self) -> None:
        if not self._is_callers:
            self._session.finish(exit_code=self._exit_code)

    def _send(self, entry: dict[str, object]) -> None:
        try:
            self._session.log(entry)
        except (TypeError, ValueError, RuntimeError) as error:
            # Of a value that W&B cannot store, such as an array that has been deleted.
            if not self._refused:
                names = ", ".join(str(name) for name in entry if name != "step")
                _log.warning(
                    "W&B cannot store the metrics of step %s (%s), which are left out: %s: %s. "
                    "Later metrics that it cannot store are left out without a warning.",
                    *(entry["step"], names, type(error).__name__, error),
                )
            self._refused = True

    def _announce(self, *, has_account: bool) -> str:
        """Prints where the run is, and returns a sentence on how to upload it."""
        session = self._session
        if session.disabled:
            return ""
        # All parts of the run: each resumed part has its own directory.
        folder = show_directory(Path(session.dir).parents[1])
        upload = f"wandb sync {shlex.quote(str(folder))}/*-{session.id}"
        if session.offline:
            reason = "no account was found"
            if has_account:
                reason = "as requested"
            say(f"W&B is offline ({reason}). To upload the run later:\n{upload}")
        else:
            say(f"W&B: {session.url}")
        return f" To upload what it has received: {upload}"

    def _add_run(self, run: RunInfo) -> None:
        """Adds the information about a run to a W&B run that was started before it."""
        session = self._session
        session.config.update({"run": plain_data(run.config)}, allow_val_change=True)
        _show_plan(session, run)
        if run.directory is None:
            return
        if run.resumed:
            _log.warning(
                "The W&B logger was called before the run was resumed, so the run continues as a "
                "new W&B run, %s. To continue the old W&B run, call the logger only during the "
                "run.",
                session.id,
            )
        _keep_id(run.directory, {"id": session.id, "project": session.project})


def wandb_logger(
    project: object,
    *,
    config: object = None,
    name: str | None = None,
    close_timeout: int | float = 30.0,
    queue_size: int = 10_000,
    **init_options: Any,
) -> WandbLogger:
    """Creates a logger that sends metrics to Weights & Biases.

    W&B runs in a separate thread. A call takes microseconds, and if W&B fails or hangs, a warning
    is logged and training continues. Without an account, or with `WANDB_MODE=offline`, the run is
    written to disk, and a printed line shows how to upload it. A run that `fit` resumes continues
    as the same W&B run, whose id is stored in `wandb.json` in the run's directory. Metrics are
    plotted over `step`. The configuration, the table of shardings and the versions of the code are
    recorded.

    **Arguments:**

    - `project`: the W&B project, or a run that `wandb.init` returned, which you finish yourself.
    - `config`: the experiment's settings: a mapping or a dataclass.
    - `name`: the run's name; by default W&B generates one.
    - `close_timeout`: the maximum time that `close()` waits for W&B, in seconds.
    - `queue_size`: the maximum number of calls that wait for W&B. Calls while the queue is full are
        dropped, and `close()` reports their number.
    - `init_options`: other arguments for `wandb.init` (`entity`, `tags`, `mode`, ...).

    **Returns:**

    A callable `(metrics, step) -> None` with the methods `start(run)`, `fail(error)` and `close()`.
    Pass it to `fit` as `log`, alone or in a list, or call it in your own logger.

    **Raises:**

    `TypeError` if `project` is neither a string nor a run of W&B, or `config` neither a mapping nor
    a dataclass. `ValueError` if a number is out of range, or if a run is given other options.

    !!! Example

        ```python
        log = rc.wandb_logger(project="lm", config={"dim": 256}, mode="disabled")
        log({"loss": 2.5}, 1)
        log.close()
        ```
    """
    session = None
    if is_wandb_run(project):
        session, names = project, list(init_options)
        if name is not None:
            names.insert(0, "name")
        if names:
            raise ValueError(
                f"{', '.join(names)} cannot be set for a run of W&B that has started: leave it out."
            )
    else:
        words = "the name of a W&B project, or a run that `wandb.init` returned"
        check_kind("project", project, str, words)
    check_number("close_timeout", close_timeout, least=0)
    check_integer("queue_size", queue_size)
    plain = plain_config(config)
    options = {"project": project, "name": name, "config": plain, **init_options}
    return WandbLogger(options, close_timeout, queue_size, session=session)


def is_wandb_run(x: object) -> bool:
    """Whether this is a run that `wandb.init` returned."""
    # A run exists only if the caller has imported W&B.
    kind = getattr(sys.modules.get("wandb"), "Run", None)
    return isinstance(kind, type) and isinstance(x, kind)


def _show_plan(session: Any, run: RunInfo) -> None:
    import wandb

    if run.plan:
        session.log({"plan": wandb.Html(f"<pre>{html.escape(run.plan)}</pre>")})
    if run.rows:
        names = list(run.rows[0])
        # Each column of a table of W&B has one type.
        data = [[_plain_cell(row[name]) for name in names] for row in run.rows]
        session.log({"plan_table": wandb.Table(columns=[*names], data=data)})


def _plain_cell(value: object) -> str | int | float:
    if isinstance(value, str | int | float):
        return value
    return str(value)


def _keep_id(directory: Path, run_id: dict[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "wandb.json").write_text(json.dumps(run_id) + "\n")


def _init_arguments(
    options: dict[str, Any], run: RunInfo, defaults: dict[str, str]
) -> dict[str, Any]:
    """Returns the arguments of `wandb.init`: the user's options, and defaults for others."""
    arguments: dict[str, Any] = {**defaults, **options}
    arguments["config"] = {**options["config"], "run": plain_data(run.config or code_version())}
    # The loop shows its progress itself, and capturing the terminal would slow down printing.
    quiet = {"silent": True, "console": "off"}
    unset = {k: v for k, v in quiet.items() if f"WANDB_{k.upper()}" not in os.environ}
    arguments["settings"] = settings = options.get("settings", {})
    if isinstance(settings, Mapping):
        arguments["settings"] = {**unset, **settings}
    if run.directory is not None:
        # Otherwise W&B's files are where the user wants them.
        if "WANDB_DIR" not in os.environ:
            arguments.setdefault("dir", str(run.directory))
        saved = ""
        if run.resumed:
            arguments.setdefault("resume", "allow")
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                saved = str(json.loads((run.directory / "wandb.json").read_text())["id"])
        # A resumed run continues the W&B run with the id that is stored next to its checkpoints.
        number = os.environ.get("WANDB_RUN_ID") or saved or secrets.token_hex(4)
        arguments.setdefault("id", number)
        _keep_id(run.directory, {name: arguments[name] for name in ("id", "project")})
    return arguments


def _has_terminal() -> bool:
    try:
        return sys.stdin.isatty()
    except (AttributeError, ValueError):  # there is no input, or it is closed
        return False


def has_account(settings: Any) -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    if getattr(settings, "api_key", None) or getattr(settings, "identity_token_file", None):
        return True
    # `wandb login` stores the key there.
    host = urlsplit(settings.base_url).netloc
    names = ["~/.netrc", "~/_netrc"]
    if "NETRC" in os.environ:
        names = [os.environ["NETRC"]]
    for name in names:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(os.path.expanduser(name)).authenticators(host):
                return True
    return False


def _skip_exit_hook() -> None:
    """Prevents W&B's exit hook from waiting for its service without a time limit."""
    # There is no public way to do so. This works with wandb 0.31.0, and
    # `tests/tracking/test_private_apis_wandb.py` fails if another version differs. The service
    # detects that this process has ended, and ends.
    with contextlib.suppress(AttributeError, KeyError):
        # An import statement would wait for an import that hangs in the thread.
        connection = sys.modules["wandb.sdk.wandb_setup"]._singleton._connection
        connection.teardown = lambda exit_code: None
