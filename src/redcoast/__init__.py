"""Automatic distributed training and inference of any PyTree model, in plain functions."""

import importlib as _importlib
import typing as _typing

from .checkpoint._checkpointer import Checkpointer as Checkpointer
from .checkpoint._checkpointer import Restored as Restored
from .checkpoint._orbax import CheckpointDamaged as CheckpointDamaged
from .checkpoint._policy import Checkpoints as Checkpoints
from .checkpoint._saver import CheckpointNotSaved as CheckpointNotSaved
from .checkpoint._tree import CheckpointMismatch as CheckpointMismatch
from .checkpoint._tree import load_checkpoint as load_checkpoint
from .checkpoint._tree import save_checkpoint as save_checkpoint
from .core._control_flow import UnsupportedJaxVersion as UnsupportedJaxVersion
from .core._decoding import Decoding as Decoding
from .core._versions import own_version as _own_version
from .data._batches import Batch as Batch
from .data._batches import Batches as Batches
from .data._batches import batches as batches
from .data._by_host import split_by_host as split_by_host
from .data._per_batch import per_batch as per_batch
from .data._token_windows import token_windows as token_windows
from .distributed._allocator import keep_freed_memory as _keep_freed_memory
from .distributed._arrays import batch_shardings as batch_shardings
from .distributed._emulation import provide_threads as _provide_threads
from .distributed._initialize import initialize as initialize
from .distributed._kv_store import ProcessLost as ProcessLost
from .distributed._mesh import emulate_devices as emulate_devices
from .distributed._mesh import make_mesh as make_mesh
from .generate import Generated as Generated
from .generate import generate as generate
from .generate import log_probabilities as log_probabilities
from .loop._early_stopping import EarlyStopping as EarlyStopping
from .loop._evaluate import evaluate as evaluate
from .loop._evaluate import predict_examples as predict_examples
from .loop._evaluation import Evaluation as Evaluation
from .loop._evaluation import compile_evaluation as compile_evaluation
from .loop._fit import fit as fit
from .loop._run_config import run_info as run_info
from .loop._steps import Step as Step
from .loop._steps import training_steps as training_steps
from .loop._stop import stop_on_signal as stop_on_signal
from .pretrained import load_pretrained as load_pretrained
from .pretrained import save_pretrained as save_pretrained
from .sharding import Hardware as Hardware
from .sharding import Plan as Plan
from .sharding import PlanReport as PlanReport
from .sharding import infer_shardings as infer_shardings
from .sharding import load_plan as load_plan
from .sharding import matrix_dimensions as matrix_dimensions
from .sharding import plan_shardings as plan_shardings
from .sharding import save_plan as save_plan
from .tracking._jsonl import jsonl_logger as jsonl_logger
from .tracking._jsonl import read_metrics as read_metrics
from .tracking._loggers import STOP as STOP
from .tracking._loggers import RunInfo as RunInfo
from .tracking._loggers import console_logger as console_logger
from .tracking._metrics import MetricsReader as MetricsReader
from .tracking._metrics import metrics_reader as metrics_reader
from .tracking._progress import progress_logger as progress_logger
from .tracking._tensorboard import tensorboard_logger as tensorboard_logger
from .tracking._trackio import trackio_logger as trackio_logger
from .tracking._wandb import wandb_logger as wandb_logger
from .train._compile import compile_step as compile_step
from .train._gradients import stop_gradient as stop_gradient
from .train._gradients import with_gradient as with_gradient
from .train._loss_scale import LossScale as LossScale
from .train._low_precision import low_precision as low_precision
from .train._muon import muon as muon
from .train._plan_step import plan_step as plan_step
from .train._predict import predict as predict
from .train._prepare import Prepared as Prepared
from .train._prepare import prepare as prepare
from .train._schedule import learning_rate_schedule as learning_rate_schedule
from .train._shampoo import shampoo as shampoo
from .train._soap import soap as soap
from .train._state import TrainState as TrainState
from .train._state import init_state as init_state
from .train._step import train_step as train_step
from .train._step import train_steps as train_steps
from .train._weight_average import moving_average as moving_average

_provide_threads()  # if devices are emulated, before JAX makes them
_keep_freed_memory(on_cpu=False)  # if JAX is told to use the CPU, before it starts its threads

if _typing.TYPE_CHECKING:
    from . import lora as lora
    from . import losses as losses
    from . import models as models
    from .dryrun import CHIPS as CHIPS
    from .dryrun import Chip as Chip
    from .dryrun import DryRun as DryRun
    from .dryrun import MeshSuggestion as MeshSuggestion
    from .dryrun import TargetComparison as TargetComparison
    from .dryrun import compare_targets as compare_targets
    from .dryrun import dry_run as dry_run
    from .dryrun import suggest_mesh as suggest_mesh
    from .dryrun import target_devices as target_devices
    from .pretrained.text import load_chat_template as load_chat_template
    from .pretrained.text import load_tokenizer as load_tokenizer
    from .scores import Estimate as Estimate
    from .scores import lm_eval_model as lm_eval_model
    from .scores import pass_at_k as pass_at_k
    from .scores import win_rate as win_rate

# Imported at first use, so that `import redcoast` costs little more than its libraries.
_LAZY = {
    "lora": ".lora",
    "losses": ".losses",
    "models": ".models",
    "CHIPS": ".dryrun",
    "Chip": ".dryrun",
    "DryRun": ".dryrun",
    "Estimate": ".scores",
    "MeshSuggestion": ".dryrun",
    "TargetComparison": ".dryrun",
    "compare_targets": ".dryrun",
    "dry_run": ".dryrun",
    "lm_eval_model": ".scores",
    "load_chat_template": ".pretrained.text",
    "load_tokenizer": ".pretrained.text",
    "pass_at_k": ".scores",
    "suggest_mesh": ".dryrun",
    "target_devices": ".dryrun",
    "win_rate": ".scores",
}


def __getattr__(name: str) -> _typing.Any:
    if name == "__version__":
        return _own_version()
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _importlib.import_module(_LAZY[name], __name__)
    if _LAZY[name] == f".{name}":
        return module
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
