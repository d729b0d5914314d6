"""Automatic distributed training and inference of any PyTree model, in plain functions."""

from ._checkpoint import load_checkpoint as load_checkpoint
from ._checkpoint import save_checkpoint as save_checkpoint
from ._compile import compile_step as compile_step
from ._evaluate import evaluate as evaluate
from ._evaluate import predict_examples as predict_examples
from ._fit import fit as fit
from ._generate import generate as generate
from ._mesh import emulate_devices as emulate_devices
from ._mesh import make_mesh as make_mesh
from ._metrics_file import read_metrics as read_metrics
from ._predict import predict as predict
from ._pretrained import load_pretrained as load_pretrained
from ._pretrained import save_pretrained as save_pretrained
from ._retention import Checkpoints as Checkpoints
from ._schedule import learning_rate_schedule as learning_rate_schedule
from ._sharding import Hardware as Hardware
from ._sharding import Plan as Plan
from ._sharding import infer_shardings as infer_shardings
from ._sharding import load_plan as load_plan
from ._sharding import plan_shardings as plan_shardings
from ._sharding import save_plan as save_plan
from ._tracking import console_logger as console_logger
from ._train import TrainState as TrainState
from ._train import init_state as init_state
from ._train import train_step as train_step
from ._wandb import wandb_logger as wandb_logger
