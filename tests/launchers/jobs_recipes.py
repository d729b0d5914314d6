"""Recipes without their clusters: types of Kubernetes, Trainer's SDK, variables of processes."""

# pyright: reportMissingImports=false

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from kubeflow_trainer_api import models

DOCS = Path(__file__).parents[2] / "docs"
SUM = """
import jax, jax.numpy as jnp, redcoast as rc
from jax.sharding import NamedSharding, PartitionSpec as P
rc.initialize(local_devices=2, timeout=200)
x = jax.device_put(jnp.arange(4.0), NamedSharding(rc.make_mesh(), P("data")))
total = float(jnp.sum(x))
print(f"{jax.process_index()} of {jax.process_count()}: {total} of {jax.device_count()}")
"""
TYPES = {
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "JobSet": models.JobsetV1alpha2JobSet,
    "Job": models.IoK8sApiBatchV1Job,
}


def manifest(page: str, kind: str) -> dict:
    blocks = re.findall(r"```yaml\n(.*?)```", (DOCS / page).read_text("utf-8"), re.S)
    actual = [part for block in blocks for part in yaml.safe_load_all(block)]
    (chosen,) = [part for part in actual if part["kind"] == kind]
    return chosen


def free_port() -> int:
    with socket.socket() as actual:
        actual.bind(("127.0.0.1", 0))
        return actual.getsockname()[1]


def check_that_they_join(command: list[str], pods: list[dict[str, str]], folder: Path) -> None:
    """Runs the command of each pod or node with its variables, all on this machine."""
    known = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    bins = str(Path(sys.executable).parent)
    known |= {"JAX_PLATFORMS": "cpu", "PATH": f"{bins}:{os.environ['PATH']}"}
    running = []
    for number, pod in enumerate(pods):
        (own := folder / str(number)).mkdir()
        (own / "train.py").write_text(SUM)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        running.append(subprocess.Popen(command, env=known | pod, cwd=own, **pipes))
    outputs = [process.communicate(timeout=240)[0] for process in running]
    for number, output in enumerate(outputs):
        assert f"{number} of {len(pods)}: 6.0 of {2 * len(pods)}" in output, output


@pytest.mark.parametrize(
    ("page", "kind"),
    [("launchers.md", "TrainJob"), ("launchers.md", "JobSet"), ("hosts.md", "Job")],
)
def test_manifests_have_only_fields_that_kubernetes_knows(page, kind):
    written = manifest(page, kind)
    assert TYPES[kind].from_dict(written).to_dict() == written  # an unknown field would be lost


@pytest.mark.parametrize(("page", "kind"), [("launchers.md", "JobSet"), ("hosts.md", "Job")])
def test_variables_of_the_manifests_connect_the_pods(page, kind, tmp_path):
    spec = manifest(page, kind)["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"] if kind == "JobSet" else spec
    (container,) = job["template"]["spec"]["containers"]
    host, port = "127.0.0.1", free_port()
    pods = []
    for number in range(job["completions"]):
        pod = {}
        for variable in container["env"]:
            source = variable.get("valueFrom", {"fieldRef": {"fieldPath": ""}})["fieldRef"]
            index = "job-completion-index" in source["fieldPath"]
            pod[variable["name"]] = str(number) if index else variable["value"]
        assert pod["REDCOAST_COORDINATOR"].split(":")[0].endswith(".train")
        pods.append(pod | {"REDCOAST_COORDINATOR": f"{host}:{port}"})
    check_that_they_join(["python", "train.py"], pods, tmp_path)


def test_script_of_skypilot_connects_the_nodes(tmp_path):
    section = (DOCS / "hosts.md").read_text("utf-8").split("## SkyPilot")[1]
    (script,) = re.findall(r"```bash\n(.*?)```", section.split("\n## ")[0], re.S)
    *variables, start = script.strip().split("\n")
    assert start.startswith("python experiments/language_modeling.py")
    run = "\n".join([*variables, "python train.py"])
    assert ":1234" in run
    shared = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2", "SKYPILOT_NUM_NODES": "2"}
    nodes = [shared | {"SKYPILOT_NODE_RANK": str(number)} for number in range(2)]
    command = ["bash", "-c", run.replace(":1234", f":{free_port()}")]
    check_that_they_join(command, nodes, tmp_path)


# What Trainer installs in a cluster, as far as its SDK reads it.
RUNTIME = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "ClusterTrainingRuntime",
    "metadata": {
        "name": "jax-distributed",
        "labels": {"trainer.kubeflow.org/framework": "jax"},
    },
    "spec": {
        "mlPolicy": {"numNodes": 1, "jax": {}},
        "template": {
            "spec": {
                "replicatedJobs": [
                    {
                        "name": "node",
                        "template": {
                            "metadata": {
                                "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
                            },
                            "spec": {
                                "template": {
                                    "spec": {"containers": [{"name": "node", "image": "jax"}]}
                                }
                            },
                        },
                    }
                ]
            }
        },
    },
}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """An API server with the one runtime; yields the list of what is posted to it."""
    posted = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self, code, body):
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def do_GET(self):
            known = self.path.endswith("/clustertrainingruntimes/jax-distributed")
            self.answer(200 if known else 404, RUNTIME if known else {})

        def do_POST(self):
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.answer(201, posted[-1])

        def log_message(self, format, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [
            {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        ],
        "users": [{"name": "u", "user": {}}],
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    yield posted
    server.shutdown()
    server.server_close()


def test_job_of_the_sdk_of_kubeflow_trainer(cluster, tmp_path):
    """The SDK's job is that of the YAML, and two of its pods' commands join by Trainer's variables.

    The SDK runs in a process of its own, because it reads KUBECONFIG when it is imported.
    """
    blocks = re.findall(r"```py\n(.*?)```", (DOCS / "launchers.md").read_text("utf-8"), re.S)
    (code,) = [block for block in blocks if "kubeflow.trainer" in block]
    first = "    rc.initialize()\n    ...\n"
    assert first in code
    body = SUM.replace(
        "import jax, jax.numpy as jnp, redcoast as rc", "import jax, jax.numpy as jnp"
    )
    (tmp_path / "sdk.py").write_text(code.replace(first, textwrap.indent(body, "    ")))
    subprocess.run([sys.executable, "sdk.py"], cwd=tmp_path, check=True, timeout=120)

    (job,) = cluster
    trainer, yaml_job = job["spec"]["trainer"], manifest("launchers.md", "TrainJob")
    assert job["spec"]["runtimeRef"]["name"] == yaml_job["spec"]["runtimeRef"]["name"]
    assert trainer["numNodes"] == yaml_job["spec"]["trainer"]["numNodes"]
    limits = trainer["resourcesPerNode"]["limits"]
    assert {k: float(v) for k, v in limits.items()} == {"nvidia.com/gpu": 8.0}
    shared = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    pods = [shared | {"JAX_PROCESS_ID": str(number)} for number in range(2)]
    check_that_they_join([*trainer["command"], *trainer.get("args", [])], pods, tmp_path)
