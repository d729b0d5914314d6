"""Names of settings and tensors of the decoders with shared experts, in Hugging Face's format."""

from collections.abc import Callable

from ...models._shared_experts import SharedExpertsConfig
from .._settings import FieldNames
from .._tensors import Tensor
from ._tables import GATED, LLAMA_FIELDS, TURNED, VECTOR, llama_ends, under, weights

MIXTURE_FIELDS: FieldNames = {
    **LLAMA_FIELDS,
    "expert_hidden": "moe_intermediate_size",
    "experts": "n_routed_experts",
    "chosen": "num_experts_per_tok",
    "shared": "n_shared_experts",
    "groups": "n_group",
    "chosen_groups": "topk_group",
    "weights_sum_to_one": ("norm_topk_prob", True),
    "route_scale": ("routed_scaling_factor", 2.5),
    "rope_base": ("rope_theta", 10000.0),
}
DENSE_LAYERS = "first_k_dense_replace"
# Settings of the training loss, and of the layers that predict further tokens.
OF_TRAINING = "seq_aux num_nextn_predict_layers num_mtp_layers "


def mixture_tensors(
    config: SharedExpertsConfig, attention: Callable[[str, str], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Maps each array to its published tensors. Layers without experts come first.

    `attention(leaf, name)` returns the tensors of attention, where arrays begin with `leaf`, and
    tensors with `name`.
    """
    c = config
    # `layers` of the model has only those with experts, whose numbers in the file follow.
    routed = f"model.layers.{{layer+{c.dense_layers}}}."
    table = _norms("layers/", routed) | attention("layers/", routed + "self_attn.")
    table["layers/router"] = Tensor(routed + "mlp.gate.weight", TURNED)
    correction = routed + "mlp.gate.e_score_correction_bias"
    # What is added to the scores that choose experts, and not to their weights.
    table["layers/correction"] = Tensor(correction, "experts -> experts")
    table |= under("layers/shared_", weights(routed + "mlp.shared_experts.", GATED, TURNED))
    table |= under("layers/", weights(routed + "mlp.experts.{expert}.", GATED, TURNED))
    if c.dense_layers:
        dense = "model.layers.{layer+0}."
        # A network of their own in place of experts.
        table |= _norms("dense/", dense) | attention("dense/", dense + "self_attn.")
        table |= under("dense/", weights(dense + "mlp.", GATED, TURNED))
    return table | llama_ends(c)


def _norms(leaf: str, layer: str) -> dict[str, Tensor]:
    names = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return under(leaf, weights(layer, names, VECTOR))
