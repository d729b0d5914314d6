"""`redcoast plan`: the plan of a model's training step on a mesh of devices that need not exist."""

import json
from math import prod

import redcoast as rc
from redcoast.dryrun._compile_job import show_sizes
from redcoast.dryrun._devices import target_place
from redcoast.dryrun._job import make_job, plan_job
from redcoast.dryrun._phases import enter_phase

from ._options import PlanCommand
from ._phase_display import show_phases
from ._usage import mesh_sizes, refuse, refuse_impossible_size
from ._workload import make_workload


def main(c: PlanCommand) -> None:
    sizes = {"data": 1} | mesh_sizes(c.mesh)
    count = prod(sizes.values())
    if min(sizes.values()) < 1:
        refuse(f"--mesh needs the number of devices of each axis, from 1 on, but is {c.mesh}.")
    most = rc.CHIPS["cpu"].per_host
    if count > most:
        refuse(f"--mesh has {count:,} devices. Plans are made for at most {most:,}.")
    refuse_impossible_size("batch", c.batch)
    try:
        workload = make_workload(c.model, c.seq)
        with show_phases():
            job = make_job(*workload.arguments(c.batch or count))
            enter_phase("Planning", f"the mesh {show_sizes(sizes)}")
            # Emulated devices, with the speeds of an A100.
            plan = plan_job(job, target_place(f"cpu:{count}").mesh(sizes), rc.Hardware())
    except (ValueError, TypeError) as error:
        refuse(str(error))
    if c.json:
        print(json.dumps(plan.report.to_json(), indent=1))
        return
    if c.table:
        print(f"{plan}\n\n{plan.table()}")
    else:
        print(str(plan).replace("plan.table(), plan.report", "--table"))
