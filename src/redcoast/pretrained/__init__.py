"""Published weights to models, and back."""

from ._api import load_pretrained as load_pretrained
from ._api import save_pretrained as save_pretrained
