"""Model families: one file each, readable as the reference of its architecture."""

from .llama import Llama as Llama
from .llama import LlamaConfig as LlamaConfig
