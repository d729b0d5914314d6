"""Scores of language models on published tasks."""

from ._lm_eval import lm_eval_model as lm_eval_model
