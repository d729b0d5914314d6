"""Loading and saving models in Hugging Face's format, with their tokenizers."""

from ._api import load_pretrained as load_pretrained
from ._api import save_pretrained as save_pretrained
