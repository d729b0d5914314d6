"""Published weights to models, and back."""

from .public import load_pretrained as load_pretrained
from .public import save_pretrained as save_pretrained
