"""Scores of language models on published tasks, and estimates with confidence intervals."""

from ._estimates import Estimate as Estimate
from ._estimates import pass_at_k as pass_at_k
from ._estimates import win_rate as win_rate
from ._lm_eval import lm_eval_model as lm_eval_model
