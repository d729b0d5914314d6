"""The server of `redcoast serve`. Its modules import the packages of the extra `serve`.

`_load_served.py` loads a model, and `_application.py` answers requests for it over HTTP.
`_openai.py` reads the requests of OpenAI's API, with `_openai_prompts.py` and `_openai_fields.py`,
and `_replies.py` writes the replies. `_batching.py` decodes the requests of all clients together, a
row each, with the compiled functions of `_decode_rows.py`, and sends the text of `_detokenize.py`.
"""

from ._extra import require_extra as require_extra
