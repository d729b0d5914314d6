"""Loading and saving models in Hugging Face's format.

`_registry.py` finds the family of a model by its settings, and `hf/` has a table of each family.
Tensors are read lazily, each process only the parts of its own devices, so that a model larger than
a host can be loaded. `gguf/` reads the files of llama.cpp.
"""

from ._api import load_pretrained as load_pretrained
from ._api import save_pretrained as save_pretrained
