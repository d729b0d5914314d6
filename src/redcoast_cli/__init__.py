"""The console command `redcoast`.

It is a package of its own because `import redcoast` imports JAX, which takes seconds, and `--help`
needs neither.
"""

from ._main import main as main
