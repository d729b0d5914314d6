from .choice.hardware import Hardware as Hardware
from .plan import Plan as Plan
from .plan import examples_coupled as examples_coupled
from .plan import infer_shardings as infer_shardings
from .plan import plan_shardings as plan_shardings
from .report.coupling import coupling_sentence as coupling_sentence
from .saved import load_plan as load_plan
from .saved import save_plan as save_plan
