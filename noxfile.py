"""The test command: ``uv run nox``.

Default sessions: lint, typecheck, the built wheel of each package alone, all together, and the coverage of all tests.
On request: ``wheels``, ``nightly``, ``lowest``, ``compat``, ``bench``, ``gpu`` (``uv run nox -s bench``).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PACKAGES = ("optim-utils", "optim-kernels", "optim-redist", "optim-dist")
PROJECTS = {package: (ROOT / "packages" / package / "pyproject.toml").read_text() for package in PACKAGES}
# the siblings that each declares, and the lowest versions that its bounds admit: "optim-utils>=0.1,<0.2" -> 0.1
NEEDS = {package: dict(re.findall(r'"(optim-[a-z]+)>=([0-9.]+),', text)) for package, text in PROJECTS.items()}
SOURCES = os.pathsep.join(f"packages/{package}/src" for package in PACKAGES)
PYTEST = ("python", "-m", "pytest", "-q", "--timeout=600")

nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "no"  # a reused environment hides undeclared imports
nox.options.parallel = 2
nox.options.allow_parallel = True
# what takes seconds, then the longest first, so that two jobs end together; coverage waits for all packages' tests
_ALONE = [f"tests({package})" for package in reversed(PACKAGES)]
nox.options.sessions = ["lint", *_ALONE, "together", "coverage", "typecheck"]

# uv does not read pip's variable; a CPU build of torch that lies there is what every session should use.
if "PIP_FIND_LINKS" in os.environ and "UV_FIND_LINKS" not in os.environ:
    os.environ["UV_FIND_LINKS"] = ",".join(os.environ["PIP_FIND_LINKS"].split())
# One thread a process: the tests start ranks of their own, and small tensors gain nothing from more.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# `uv run nox` sets these for its own environment; the sessions have theirs.
os.environ.pop("UV_PROJECT_ENVIRONMENT", None)
# Ranks and fresh processes by the dozen import torch: without its bytecode each would compile it again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def _local_torch() -> str | None:
    """The version of a CPU build of torch for this python in UV_FIND_LINKS, as ``2.13.0+cpu``."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for folder in os.environ.get("UV_FIND_LINKS", "").split(","):
        for wheel in sorted(Path(folder).glob("torch-*+cpu-*.whl")) if folder else []:
            if f"-{tag}-" in wheel.name:
                return wheel.name.split("-")[1]
    return None


def _install(session: nox.Session, *what: str) -> None:
    """Install, holding torch at the local CPU build where there is one."""
    if (version := _local_torch()) is not None:
        constraint = Path(session.create_tmp()) / "constraints.txt"
        constraint.write_text(f"torch=={version}\n")
        what = (*what, "--constraint", str(constraint))
    session.install(*what)
    _link_bytecode(Path(session.virtualenv.location))


def _link_bytecode(environment: Path) -> None:
    """Link what Python has compiled of the same files for other sessions, as uv links these from its cache.

    Of torch and what it imports that takes a quarter of a minute for each environment.
    """
    for own in environment.absolute().glob("lib/python*/site-packages"):
        for other in ROOT.glob(f".nox/*/lib/{own.parent.name}/site-packages"):
            with suppress(OSError):  # another session may be about to make its environment
                for compiled in other.rglob("__pycache__/*.pyc"):
                    target = own / compiled.relative_to(other)
                    source = target.parents[1] / f"{compiled.name.partition('.')[0]}.py"
                    if source.exists() and source.samefile(compiled.parents[1] / source.name) and not target.exists():
                        target.parent.mkdir(exist_ok=True)
                        os.link(compiled, target)


def _groups(*names: str) -> tuple[str, ...]:
    """What installs dependency groups of the root."""
    return tuple(part for name in names for part in ("--group", f"{ROOT / 'pyproject.toml'}:{name}"))


TEST_TOOLS = _groups("test")


def _source(package: str) -> str:
    return str(ROOT / "packages" / package)


def _tests(package: str) -> str:
    return f"packages/{package}/tests"


@nox.session
def lint(session: nox.Session) -> None:
    """Style of the code, the direction of its imports, and an audit of the workflows that needs no network."""
    session.install(*_groups("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": SOURCES})
    session.run("zizmor", "--offline", "--no-progress", ".github")


@nox.session
def typecheck(session: nox.Session) -> None:
    """``mypy --strict`` over the sources of all packages, and over programs that say what users' checkers see."""
    _install(session, *map(_source, PACKAGES), *_groups("type"))
    typed = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/tests/typed_*.py"))
    session.run("mypy", *(f"packages/{package}/src" for package in PACKAGES), *typed)


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """The built wheel of one package with what it declares and nothing else, and all tests on it.

    Wheels are the only check that sees a wrong bound on a sibling. They hold every file of the sources, and every
    module imports. What the tests reach is measured on the way.
    """
    _install_wheel(session, package, *_groups("test", "cov"))
    run = ("coverage", "run", f"--data-file={_measured(package)}", *PYTEST[1:], "-p", "measured")
    session.run(*run, _tests(package), *session.posargs, env={"PYTHONPATH": ".ci"})


def _measured(package: str) -> str:
    return f".coverage.{package}"


@nox.session
def together(session: nox.Session) -> None:
    """All packages in one environment, where the benchmarks' own tests run."""
    _install(session, *map(_source, PACKAGES), *_groups("test", "bench"))
    session.run(*PYTEST, "benchmarks", *session.posargs)


@nox.session(requires=[f"tests({package})" for package in PACKAGES])
def coverage(session: nox.Session) -> None:
    """What the tests of all packages reach; the sources are enough to say it."""
    session.install(*_groups("cov"))
    session.run("coverage", "combine", *map(_measured, PACKAGES))
    session.run("coverage", "report", "--fail-under=80")


def _build_wheels(folder: Path, *packages: str, root: Path = ROOT) -> None:
    for package in packages:
        command = ["uv", "build", "--quiet", "--wheel", "--no-sources", "--out-dir", str(folder)]
        subprocess.run([*command, str(root / "packages" / package)], check=True)


CHECK_WHEEL = """
import importlib, importlib.metadata, pathlib, pkgutil, sys

sys.modules["numpy"] = None  # a test tool, which no package declares
name, source = sys.argv[1], pathlib.Path(sys.argv[2])
distribution = importlib.metadata.distribution(name)
installed = {file.as_posix() for file in distribution.files if file.parts[0] == name.replace("-", "_")}
written = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.suffix in (".py", ".typed")}
assert written == {file for file in installed if not file.endswith(".pyc")}, written ^ installed
package = importlib.import_module(name.replace("-", "_"))
assert distribution.metadata["Metadata-Version"] == "2.4", distribution.metadata["Metadata-Version"]
assert source not in pathlib.Path(package.__file__).parents, package.__file__
modules = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
for module in modules:
    if not module.endswith(".__main__"):
        importlib.import_module(module)
scripts = [script.load() for script in distribution.entry_points]
print(f"{package.__file__}: version {distribution.version}, {len(modules)} modules, {len(scripts)} scripts")
"""


def _install_wheel(session: nox.Session, package: str, *what: str) -> None:
    """Install the package's wheel by name, built with those of its siblings, and look whether all of it is there."""
    # a folder of its own every time: uv remembers a wheel by its path, and would install an older build of this version
    with tempfile.TemporaryDirectory() as folder:
        _build_wheels(Path(folder), package, *NEEDS[package])
        _install(session, "--no-sources", *_find_links(Path(folder)), package, *what)
    quietly = ("-W", "ignore:Failed to initialize NumPy")
    session.run("python", "-I", *quietly, "-c", CHECK_WHEEL, package, f"{_source(package)}/src", log=False)


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def wheels(session: nox.Session, package: str) -> None:
    """The built wheel and the tests marked ``installed``, in a minute: ``tests`` without what takes longer."""
    _install_wheel(session, package, *TEST_TOOLS)
    session.run(*PYTEST, "-m", "installed", _tests(package), *session.posargs)


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def nightly(session: nox.Session, package: str) -> None:
    """The tests of one package that take minutes, which the other sessions leave out."""
    _install(session, _source(package), *TEST_TOOLS)
    session.run("python", "-m", "pytest", "-q", "--timeout=3600", "-m", "nightly", _tests(package), *session.posargs)


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def lowest(session: nox.Session, package: str) -> None:
    """The lowest direct dependencies that the package declares; the test tools come after, at their own versions."""
    session.install(_source(package), "--resolution", "lowest-direct")
    # what old releases need and do not declare: triton's interpreter an older numpy, torch's inductor setuptools
    session.install(*TEST_TOOLS, "numpy<2.4", "setuptools<81")
    session.run(*PYTEST, _tests(package), *session.posargs)


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def compat(session: nox.Session, package: str) -> None:
    """Versions are independent: against the lowest siblings that bounds admit, and against the newest dependents.

    A sibling or dependent is taken as it was when its version was set.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        pins = [_wheel_of_version(sibling, version, folder) for sibling, version in NEEDS[package].items()]
        _build_wheels(folder, package)
        links = _find_links(folder)
        _install(session, "--no-sources", *links, package, *pins, *TEST_TOOLS)
        session.run(*PYTEST, _tests(package), *session.posargs)
    for dependent in (name for name in PACKAGES if package in NEEDS[name]):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            pin = _wheel_of_version(dependent, _version(dependent), folder)
            _build_wheels(folder, *NEEDS[dependent])
            _install(session, "--reinstall", "--no-sources", *_find_links(folder), pin, *TEST_TOOLS)
            session.run(*PYTEST, str(folder / dependent / _tests(dependent)), *session.posargs)


def _find_links(folder: Path) -> list[str]:
    """``--find-links`` for the folder and for what the variable names, which the option would replace."""
    places = [str(folder), *filter(None, os.environ.get("UV_FIND_LINKS", "").split(","))]
    return [part for place in places for part in ("--find-links", place)]


def _wheel_of_version(package: str, version: str, folder: Path) -> str:
    """Build the package as it was when it got this version; the tree stays in ``folder / package``."""
    tree = folder / package
    archive = subprocess.run(
        ["git", "archive", _commit_that_set(package, version)], check=True, capture_output=True, cwd=ROOT
    )
    tree.mkdir()
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
    _build_wheels(folder, package, root=tree)
    return f"{package}=={version}"


def _version(package: str) -> str:
    return re.search(r'^version = "(.*)"', PROJECTS[package], re.MULTILINE)[1]


def _commit_that_set(package: str, version: str) -> str:
    """The newest commit that set this version (``0.1`` also means ``0.1.0``) in the package's pyproject."""
    path = f"packages/{package}/pyproject.toml"
    pattern = rf'^version = "{re.escape(version)}(\.0)*"'
    for commit in _git("log", "-G", pattern, "--format=%H", "--", path).split():
        if re.search(pattern, _git("show", f"{commit}:{path}"), re.MULTILINE):
            return commit
    raise RuntimeError(f"no commit in the history sets {package} to version {version}; fetch the whole history")


def _git(*command: str) -> str:
    return subprocess.run(["git", *command], check=True, capture_output=True, text=True, cwd=ROOT).stdout


@nox.session
def bench(session: nox.Session) -> None:
    """The benchmarks at sizes for a CPU; the correctness tests run first."""
    _install(session, *map(_source, PACKAGES), *_groups("test", "bench"))
    session.run(*PYTEST, "-x")
    ranks = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    for script in sorted((ROOT / "benchmarks").glob("*_benchmark.py")):
        launch = ranks if script.stem in ("dist_benchmark", "training_benchmark") else ()
        session.run("python", *launch, "-m", f"benchmarks.{script.stem}", *session.posargs)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Everything compiled, on a CUDA host: the python that runs nox, with what is installed there."""
    session.run(sys.executable, "-m", "pytest", "-q", *session.posargs, env={"PYTHONPATH": SOURCES})
