"""The console command `redcoast`.

It is a separate package, because `import redcoast` imports JAX, which takes seconds and is not
needed for `--help`.
"""

from ._main import main as main
