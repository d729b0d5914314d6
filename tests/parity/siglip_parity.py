"""SigLIP against `transformers`: logits of all images and texts, the loss and its gradients."""

# pyright: reportMissingImports=false

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from harness import (
    TOLERANCE,
    Case,
    batch_for,
    check_outputs,
    check_training,
    gradient_errors,
    make_reference,
    published_gradients,
    reference_gradients,
)
from published import apply
from transformers import SiglipModel

from redcoast import load_pretrained
from redcoast.losses import pairwise_sigmoid

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 56}
IMAGE, TEXT = SIZES | {"image_size": 16, "patch_size": 4}, SIZES | {"vocab_size": 48}
TEXT |= {"max_position_embeddings": 12, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 1}
OTHER = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 3, "hidden_act": "gelu"}
ODD = {"image_size": 15, "num_channels": 1}

CASES = [
    Case("siglip", SiglipModel, {"vision_config": IMAGE, "text_config": TEXT}),
    Case(
        "siglip unequal",
        SiglipModel,
        {"vision_config": IMAGE | ODD, "text_config": TEXT | OTHER | {"projection_size": 32}},
    ),
]


@pytest.mark.parametrize("check", [check_outputs, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_siglip(case, check, tmp_path):
    check(case, tmp_path)


def test_the_loss_and_its_gradients(tmp_path):
    reference = make_reference(CASES[1], tmp_path / "theirs")
    batch = batch_for(reference, tmp_path / "theirs")
    tokens = torch.tensor(batch["tokens"].astype(np.int64))
    pixels = torch.tensor(batch["pixels"])
    expected = reference(input_ids=tokens, pixel_values=pixels, return_loss=True).loss
    expected.backward()
    theirs = reference_gradients(reference, tmp_path / "gradients")
    model = load_pretrained(tmp_path / "theirs")
    loss = lambda model, batch: pairwise_sigmoid(apply(model, batch))
    actual, gradients = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, batch)
    errors = gradient_errors(published_gradients(gradients, tmp_path / "ours"), theirs)
    assert abs(float(actual) - expected.item()) < TOLERANCE
    assert max(errors.values()) < TOLERANCE


def test_masked_texts(tmp_path):
    reference = make_reference(CASES[0], tmp_path)
    batch = batch_for(reference, tmp_path)
    mask = (np.arange(12)[None] >= np.arange(4)[:, None]).astype(np.int32)
    tokens = batch["tokens"]
    inputs = (torch.tensor(x.astype(np.int64)) for x in (tokens, mask))
    with torch.no_grad():
        out = reference.get_text_features(*inputs).pooler_output
    actual = load_pretrained(tmp_path).encode_texts(jnp.asarray(tokens), mask=jnp.asarray(mask))
    assert np.abs(np.asarray(actual) - out.numpy()).max() < TOLERANCE
