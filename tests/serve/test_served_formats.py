"""Answers of a form that a request asks for."""

import json

import pytest
from serve_helpers import load, streamed, together, write_weights

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"legs": {"type": "integer", "maximum": 99}, "kind": {"enum": ["ant", "bee"]}},
    "required": ["legs", "kind"],
    "additionalProperties": False,
}
SAY = {"messages": [{"role": "user", "content": "Hi"}]}


def form(schema):
    return {"type": "json_schema", "json_schema": {"name": "insect", "schema": schema}}


@pytest.mark.integration
def test_a_model_of_random_weights_answers_in_the_form_of_a_schema(tmp_path):
    """Beside rows without a form, whose answers stay as they are."""
    loaded = load(write_weights(tmp_path / "tiny", eos=(0,)), context=256)
    plain = {"prompt": "a", "max_tokens": 30, "temperature": 0}
    shaped = {**SAY, "max_tokens": 100, "response_format": form(SCHEMA), "temperature": 1.0}
    alone = together(loaded, ("completions", plain))[0].json()["choices"]
    beside, whole, parts, refused, other = together(
        loaded,
        ("completions", plain),
        ("chat/completions", shaped),
        ("chat/completions", {**shaped, "stream": True}),
        ("chat/completions", {**SAY, "response_format": form({"type": "animal"})}),
        ("chat/completions", {**SAY, "response_format": {"type": "xml"}}),
    )
    assert beside.json()["choices"] == alone
    choice = whole.json()["choices"][0]
    actual = json.loads(choice["message"]["content"])
    assert actual["kind"] in ("ant", "bee")
    assert actual["legs"] <= 99
    assert choice["finish_reason"] == "stop"
    text = "".join(x["choices"][0]["delta"].get("content", "") for x in streamed(parts))
    assert set(json.loads(text)) == {"legs", "kind"}
    for response, words in ((refused, "cannot be served"), (other, "must have the type 'text'")):
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "response_format"
        assert words in response.json()["error"]["message"]
