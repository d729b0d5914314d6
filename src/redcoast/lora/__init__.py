"""Low-rank adapters (LoRA): trains a small low-rank update of each frozen matrix."""

from ..models._einsum import LowRank as LowRank
from ..models._quantised_weight import QuantisedWeight as QuantisedWeight
from ._adapters import adapters as adapters
from ._adapters import add_adapters as add_adapters
from ._adapters import merge as merge
from ._adapters import trainable as trainable
from ._adapters import with_adapters as with_adapters
from ._adapters import without_adapters as without_adapters
from ._peft_load import load_adapters as load_adapters
from ._peft_save import save_adapters as save_adapters
from ._quantise import dequantise as dequantise
from ._quantise import quantise as quantise
