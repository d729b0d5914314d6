"""Plans: how the arrays of a model are divided over a mesh, read off the program that uses them."""

from ._matrix_dimensions import matrix_dimensions as matrix_dimensions
from ._plan import Plan as Plan
from ._plan import infer_shardings as infer_shardings
from ._plan import plan_shardings as plan_shardings
from ._plan import with_auto_plan as with_auto_plan
from ._serialization import load_plan as load_plan
from ._serialization import save_plan as save_plan
from .program._trace import Traced as Traced
from .program._trace import trace as trace
from .report._data import Coupling as Coupling
from .report._data import PlanReport as PlanReport
from .report._text import coupling_sentence as coupling_sentence
from .solver._hardware import Hardware as Hardware
