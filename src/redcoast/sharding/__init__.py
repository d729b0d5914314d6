from ._plan import Plan as Plan
from ._plan import examples_coupled as examples_coupled
from ._plan import infer_shardings as infer_shardings
from ._plan import plan_shardings as plan_shardings
from ._serialization import load_plan as load_plan
from ._serialization import save_plan as save_plan
from .report._text import coupling_sentence as coupling_sentence
from .solver._hardware import Hardware as Hardware
