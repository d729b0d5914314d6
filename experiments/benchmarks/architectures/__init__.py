"""Models of many kinds as small functions, for measurements of plans."""

from .case import Case as Case
from .convolutional import CONVOLUTIONAL
from .encoders import ENCODERS
from .experts import EXPERT_MIXTURES
from .learning import LEARNING
from .ode import ODES
from .recurrent import RECURRENT
from .science import SCIENCE as SCIENCE
from .transformers import DECODERS, LARGE
from .transformers import opt_layers as opt_layers
from .varied import VARIED as VARIED
from .vision import VISION, VIT

TRANSFORMERS = (*DECODERS, *ENCODERS, VIT)
OTHERS = (*VISION, *CONVOLUTIONAL, *EXPERT_MIXTURES, *RECURRENT, *LEARNING, *ODES)
CASES: tuple[Case, ...] = (*TRANSFORMERS, *OTHERS, *LARGE)
