from .traffic import Collective as Collective
from .traffic import by_kind_and_axes as by_kind_and_axes
from .traffic import collectives as collectives
from .traffic import sent_bytes as sent_bytes
