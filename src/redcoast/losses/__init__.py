"""Losses: cross-entropy of tokens, pairs of images and texts, preferences and rewards."""

from ._cross_entropy import chunked_cross_entropy as chunked_cross_entropy
from ._cross_entropy import cross_entropy as cross_entropy
from ._cross_entropy import pairwise_sigmoid as pairwise_sigmoid
from ._cross_entropy import token_log_probabilities as token_log_probabilities
from ._policy_losses import dapo as dapo
from ._policy_losses import dr_grpo as dr_grpo
from ._policy_losses import grpo as grpo
from ._policy_losses import grpo_advantages as grpo_advantages
from ._policy_losses import kl_estimate as kl_estimate
from ._policy_losses import reverse_kl as reverse_kl
from ._policy_losses import rloo_advantages as rloo_advantages
from ._preference_losses import bradley_terry as bradley_terry
from ._preference_losses import dpo as dpo
from ._preference_losses import ipo as ipo
from ._preference_losses import kto as kto
from ._preference_losses import orpo as orpo
from ._preference_losses import simpo as simpo
