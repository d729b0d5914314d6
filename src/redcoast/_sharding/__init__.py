from .plan import Plan as Plan, infer_shardings as infer_shardings, plan_shardings as plan_shardings
