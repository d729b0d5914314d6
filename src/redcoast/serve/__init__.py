"""The server of `redcoast serve`. Its modules import the packages of the extra `serve`.

`_openai.py` reads and answers requests in the format of OpenAI's API. `_batching.py` decodes the
requests of all clients together, a row each, with the compiled functions of `_decode_rows.py`.
"""

from ._extra import require_extra as require_extra
