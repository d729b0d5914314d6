"""The loss of Mixtral's routers against `transformers`."""

# pyright: reportMissingImports=false

import equinox as eqx
import numpy as np
import pytest
import torch
from harness import batch_for, load_pretrained, make_reference
from mixtral_parity import CASES as MIXTRAL_CASES


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("case", MIXTRAL_CASES, ids=str)
def test_router_loss(case, padded, tmp_path):
    reference = make_reference(case, tmp_path)
    batch = batch_for(reference, tmp_path)
    # Only padding on the right leaves the positions of `transformers` alone.
    mask = np.sort(batch["mask"], axis=1)[:, ::-1].copy()
    ours = {"mask": mask} if padded else {}
    theirs = {"attention_mask": torch.tensor(mask)} if padded else {}
    tokens = torch.tensor(batch["tokens"].astype("l"))
    expected = reference(tokens, **theirs, output_router_logits=True).aux_loss
    run = eqx.filter_jit(lambda model, *args, **more: model.hidden_and_router_loss(*args, **more))
    _, actual = run(load_pretrained(tmp_path), batch["tokens"], **ours)
    assert actual > 1
    np.testing.assert_allclose(actual, expected.item(), rtol=1e-5)
