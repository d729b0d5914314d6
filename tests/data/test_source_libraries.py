"""The sources of other libraries, as the page on sources shows them, resume bitwise."""

import re
import textwrap
from typing import Any

import jax
import numpy as np
import pytest
from paths import ROOT

import redcoast as rc

LIBRARIES = ("grain", "datasets", "pyarrow", "torch", "torchdata", "webdataset")
PAGE = (ROOT / "docs" / "howto" / "sources.md").read_text("utf-8")


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
def test_every_source_of_the_page_is_trained_on_and_resumes_bitwise(tmp_path, monkeypatch):
    for library in LIBRARIES:
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    calls = []
    actual = re.findall(r"^( *)```(?:py|python)\n(.*?)^\1```$", PAGE, re.MULTILINE | re.DOTALL)
    setup, *blocks = (textwrap.dedent(body) for _, body in actual)
    namespace: dict[str, Any] = {"__name__": "page"}
    exec(setup, namespace)
    fit = namespace["train"]
    namespace["train"] = lambda *args, **options: calls.append(
        (args, options, fit(*args, **options))
    )
    for i, block in enumerate(blocks):
        exec(compile(block, f"<block {i}>", "exec"), namespace)
    assert len(calls) >= 13
    for i, (args, options, expected) in enumerate(calls):
        checkpoints = rc.Checkpoints(tmp_path / f"run{i}")
        last = int(expected.step)
        fit(*args, **options | {"steps": last - 3}, checkpoints=checkpoints)
        resumed = fit(*args, **options, checkpoints=checkpoints)
        assert int(resumed.step) == last
        leaves = zip(jax.tree.leaves(resumed.model), jax.tree.leaves(expected.model), strict=True)
        for a, b in leaves:
            if isinstance(a, jax.Array):
                np.testing.assert_array_equal(a, b, err_msg=str(args))
