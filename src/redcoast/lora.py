"""Low-rank adapters (LoRA): all that is trained is a small product beside each frozen matrix."""

from ._lora.adapt import adapters as adapters
from ._lora.adapt import add_adapters as add_adapters
from ._lora.adapt import merge as merge
from ._lora.adapt import trainable as trainable
from ._lora.adapt import with_adapters as with_adapters
from ._lora.peft_read import load_adapters as load_adapters
from ._lora.peft_write import save_adapters as save_adapters
from .models._product import LowRank as LowRank
