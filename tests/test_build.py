"""Building, packing, installing and importing, in copies of the source tree and in new processes.

Nearly all of it without CUDA: that takes seconds, and what differs is the compiler, not the build.
"""

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"

pytestmark = [
    pytest.mark.skipif(not (shutil.which("g++") and shutil.which("ninja")), reason="no compiler"),
    pytest.mark.timeout(300),
]
needs_git = pytest.mark.skipif(not shutil.which("git"), reason="git is not on PATH")
# Not importlib.util.find_spec: setuptools takes that for a run of pip, and then Inductor breaks.
HAS_PIP = any(d.name == "pip" for d in importlib.metadata.distributions())
needs_pip = pytest.mark.skipif(not HAS_PIP, reason="no pip")
needs_binutils = pytest.mark.skipif(
    not (shutil.which("nm") and shutil.which("readelf")), reason="no binutils"
)
needs_cuda_torch = pytest.mark.skipif(not torch.version.cuda, reason="torch has no CUDA")


# ---- tools --------------------------------------------------------------------------------------


def environment(**changes):
    """This process's, without what steers a build, and with `changes`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("CUDA_HOME", "CUDA_PATH", "PYTHONPATH")
        and not name.startswith(("TORCH_SGEMM_", "TORCH_CUDA_", "GIT_", "PIP_"))
    }
    kept |= {"MAX_JOBS": "2", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    return kept | {name: str(value) for name, value in changes.items()}


CPU_ONLY = environment(TORCH_SGEMM_CUDA=0)


def python(*arguments, cwd, env=CPU_ONLY):
    """A Python process: (exit status, stdout, stderr)."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stdout, done.stderr


def build(tree, env=CPU_ONLY, command=("build_ext", "--inplace")):
    """Builds in a tree and returns what it printed."""
    code, out, errors = python("setup.py", *command, cwd=tree, env=env)
    assert code == 0, out + errors
    return out


def script(code, package, cwd):
    """Runs Python code with the torch_sgemm that is in the folder `package`."""
    return python("-c", code, cwd=cwd, env=environment(PYTHONPATH=package))


def printed(code, package, cwd):
    status, out, errors = script(code, package, cwd)
    assert status == 0, errors
    return out


def git(tree, *arguments):
    who = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    done = subprocess.run(
        ["git", *who, *arguments], cwd=tree, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def copy_sources(tree):
    """What a clone has, as it is in the working tree."""
    built = shutil.ignore_patterns("_C*.so", "_build_info.py", "__pycache__")
    for name in ("csrc", "torch_sgemm"):
        shutil.copytree(ROOT / name, tree / name, ignore=built)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tree)
    (tree / "tests").mkdir()
    (tree / "tests" / "test_x.py").touch()
    return tree


def build_info(folder):
    values = {}
    exec((folder / "_build_info.py").read_text(), values)
    return values


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A CPU-only build in a git repository. Who changes something in it puts it back."""
    tree = copy_sources(tmp_path_factory.mktemp("tree"))
    if shutil.which("git"):
        git(tree, "init", "-q")
        git(tree, "add", "-A")
        git(tree, "commit", "-q", "-m", "all")
    tree.joinpath("first_build.txt").write_text(build(tree))
    return tree


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory):
    """The wheel that pip makes of the same tree."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = ("-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", folder)
    code, out, errors = python(*pip, ".", cwd=tree)
    assert code == 0, out + errors
    (file,) = folder.iterdir()
    return file


@pytest.fixture
def package(tree, tmp_path):
    """A copy of the built package alone, to be spoilt: tmp_path is to be on the path."""
    shutil.copytree(tree / "torch_sgemm", tmp_path / "torch_sgemm")
    return tmp_path / "torch_sgemm"


RIGHT = """
import torch, torch_sgemm
print(torch_sgemm.__file__, torch_sgemm.__version__)
a, b, c = torch.randn(37, 21), torch.randn(21, 50), torch.randn(50)
exact = 2.0 * (a.double() @ b.double()) - 0.5 * c.double()
for name, stage in torch_sgemm.STAGES.items():
    result = stage(a, b, c, alpha=2.0, beta=-0.5)
    print(name, "right" if (result.double() - exact).abs().max() < 1e-4 else "wrong")
"""


def require_right(package, cwd, version="cpu"):
    """torch_sgemm is the one in `package`, and its stages are right on the CPU."""
    first, *stages = printed(RIGHT, package, cwd).splitlines()
    file, found = first.split()
    assert Path(file) == Path(package) / "torch_sgemm" / "__init__.py"
    assert re.fullmatch(rf"\d+\.\d+\.\d+\+{version}", found)
    listed = re.findall(r"X\((\w+)\)", (CSRC / "stages.h").read_text().split("SGEMM_STAGES(X)")[1])
    assert stages == [f"{name} right" for name in listed]
    assert len(stages) >= 7


# ---- CPU-only builds ----------------------------------------------------------------------------


def test_cpu_only_build_is_right(tree, tmp_path):
    """TORCH_SGEMM_CUDA=0: a library, its description, and right results."""
    require_right(tree, tmp_path)
    info = build_info(tree / "torch_sgemm")
    assert info["VERSION"].endswith("+cpu")
    assert info["CUDA"] is None
    assert info["NO_CUDA"] == "TORCH_SGEMM_CUDA=0 was set when it was built"
    assert info["TORCH"] == torch.__version__
    first = tree.joinpath("first_build.txt").read_text().splitlines()
    assert [line for line in first if "CPU only" in line] == [
        "torch_sgemm: CPU only, as TORCH_SGEMM_CUDA=0 was set when it was built"
    ]


ON_CUDA = """
import torch, torch_sgemm
a, b, out = torch.ones(3, 4), torch.ones(4, 5), torch.empty(3, 5)
cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
ops = torch.ops.sgemm
print((ops.stage0.default.redispatch(cpu, a, b) == 4).all().item())
products = ("mm", "addmm", "bmm", "baddbmm", "linear")
for name in (*torch_sgemm.STAGES, "cublas", *products):
    packet = getattr(ops, name)
    tensors = (a, a, b) if "add" in name else (a, b)
    for call in (
        lambda: packet.default.redispatch(cuda, *tensors),
        lambda: packet.out.redispatch(cuda, *tensors, out=out),
    ):
        try:
            print("returned", call())
        except RuntimeError as error:
            print(error)
try:
    ops.ffma_peak.default.redispatch(cuda, a, 1)
except RuntimeError as error:
    print(error)
"""


def on_cuda(package, cwd):
    """What ops of a CPU-only build answer where CUDA tensors arrive: one text for all of them."""
    right, *answers = printed(ON_CUDA, package, cwd).splitlines()
    assert right == "True"  # the same call with the CPU's key does reach the C++ function
    assert len(answers) >= 2 * (7 + 1 + 5) + 1
    assert len(set(answers)) == 1, answers
    return answers[0]


def test_cuda_tensors_are_told_the_reason(tree, tmp_path):
    """B49: without CUDA kernels, an op that CUDA tensors reach says why there are none."""
    # No Python file knows this text: it comes from the library.
    text = "this build of torch_sgemm has no CUDA kernels: "
    assert not any(text in file.read_text() for file in tree.glob("torch_sgemm/*.py"))
    expected = text + "TORCH_SGEMM_CUDA=0 was set when it was built"
    assert on_cuda(tree, tmp_path) == expected


# ---- builds that find no CUDA -------------------------------------------------------------------


@pytest.fixture(scope="module")
def no_cuda(tmp_path_factory):
    """Environments in which CUDA is not to be had, and the reason that is expected."""
    folder = tmp_path_factory.mktemp("cuda")
    paths = [
        path
        for path in os.environ["PATH"].split(os.pathsep)
        if not Path(path, "nvcc").exists() or Path(path, "g++").exists()
    ]

    def home(name, nvcc=None, header=False):
        root = folder / name
        (root / "bin").mkdir(parents=True)
        (root / "include").mkdir()
        if nvcc:
            (root / "bin" / "nvcc").write_text(f"#!/bin/sh\necho 'release {nvcc}, V{nvcc}.1'\n")
            (root / "bin" / "nvcc").chmod(0o755)
        if header:
            (root / "include" / "cublas_v2.h").touch()
        return environment(CUDA_HOME=root, PATH=os.pathsep.join(paths))

    return {
        "no nvcc": (
            home("empty"),
            "nvcc was not found when it was built; install the CUDA toolkit or set CUDA_HOME",
        ),
        "no cuBLAS": (
            home("nvcc", torch.version.cuda),
            "cublas_v2.h was not beside nvcc when it was built; install cuBLAS's headers",
        ),
        "another CUDA": (
            home("other", "99.1", header=True),
            f"nvcc was CUDA 99.1 and torch {torch.__version__} CUDA {torch.version.cuda} when it "
            "was built; install a toolkit of torch's CUDA major version, or a torch for this one",
        ),
    }


@needs_cuda_torch
@pytest.mark.parametrize("lack", ["no nvcc", "no cuBLAS", "another CUDA"])
def test_wanted_cuda_that_is_missing_is_an_error(lack, no_cuda, tmp_path):
    """TORCH_SGEMM_CUDA=1: one sentence says why that cannot be, and nothing is built."""
    tree = copy_sources(tmp_path)
    env, reason = no_cuda[lack]
    env = env | {"TORCH_SGEMM_CUDA": "1"}
    code, _, errors = python("setup.py", "build_ext", "--inplace", cwd=tree, env=env)
    assert code == 1
    sentence = f"TORCH_SGEMM_CUDA=1, but no CUDA build of torch_sgemm is possible: {reason}"
    assert errors.splitlines()[-1] == sentence
    assert "Traceback" not in errors
    assert not [*tree.rglob("*.o"), *tree.rglob("*.so")]


@needs_cuda_torch
def test_missing_cuda_is_said_and_left_out(no_cuda, tmp_path):
    """Without TORCH_SGEMM_CUDA: one line about it, a CPU-only build, and the reason in its errors.

    A build for another reason, in the same tree, takes the place of the first.
    """
    (tmp_path / "tree").mkdir()
    tree = copy_sources(tmp_path / "tree")
    for lack in ("no nvcc", "another CUDA"):
        env, reason = no_cuda[lack]
        out = build(tree, env)
        assert [line for line in out.splitlines() if reason[:20] in line and "++" not in line] == [
            f"torch_sgemm: CPU only, as {reason}"
        ]
        assert build_info(tree / "torch_sgemm")["NO_CUDA"] == reason
        assert on_cuda(tree, tmp_path) == f"this build of torch_sgemm has no CUDA kernels: {reason}"
    assert build_info(tree / "torch_sgemm")["COMMIT"] is None  # no repository
    require_right(tree, tmp_path)


SETUP = """
import runpy, sys
import setuptools, torch
setuptools.setup = lambda **arguments: print(arguments["options"]["bdist_wheel"]["build_number"])
torch.cuda.device_count = lambda: {devices}
torch.cuda.get_device_capability = [(9, 0), (8, 6)].__getitem__
sys.argv = ["setup.py", {command!r}]
print(runpy.run_path("setup.py")["ARCHS"])
"""


@needs_cuda_torch
@pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not on PATH")
def test_architectures(tmp_path):
    """With no GPU and no list: 9.0a in place, all in a wheel. Else the list, or the GPUs."""
    tree = copy_sources(tmp_path)

    def archs(command, devices=0, **changes):
        code = SETUP.format(command=command, devices=devices)
        status, out, errors = python("-c", code, cwd=tree, env=environment(**changes))
        assert status == 0, errors
        version, found = out.splitlines()[-2:]
        assert version == f"1cu{torch.version.cuda.split('.')[0]}"
        return found

    assert archs("build_ext") == "9.0a"
    assert archs("bdist_wheel") == "8.0;8.6;8.9;9.0a;10.0;12.0+PTX"
    assert archs("build_ext", TORCH_CUDA_ARCH_LIST="7.5") == "7.5"
    assert archs("bdist_wheel", devices=2) == "8.6;9.0a"


# ---- building again -----------------------------------------------------------------------------


def objects(tree):
    return {file: file.stat().st_mtime_ns for file in tree.rglob("build/temp*/**/*.o")}


def library(tree):
    return hashlib.sha256((tree / "torch_sgemm" / "_C.abi3.so").read_bytes()).hexdigest()


def rebuilt(tree, before):
    """The object files that are newer than before, by name."""
    after = objects(tree)
    assert after.keys() == before.keys()
    return sorted(file.stem for file, time in after.items() if time != before[file])


def test_second_build_builds_nothing(tree):
    """No object is compiled again, and the library and its description are the same."""
    before, digest = objects(tree), library(tree)
    info = (tree / "torch_sgemm" / "_build_info.py").stat().st_mtime_ns
    assert len(before) >= 12
    build(tree)
    assert rebuilt(tree, before) == []
    assert library(tree) == digest
    assert (tree / "torch_sgemm" / "_build_info.py").stat().st_mtime_ns == info


def test_touched_stage_is_built_alone(tree):
    """A stage is a translation unit: only what includes a changed file is compiled again."""
    before, digest = objects(tree), library(tree)
    os.utime(tree / "csrc" / "stages" / "stage03_register_tile.cu")
    build(tree)
    assert rebuilt(tree, before) == ["stage03_register_tile"]
    assert library(tree) == digest


def test_changed_header_is_noticed(tree):
    """gemm.cuh is in every stage, and not in the op layer."""
    before = objects(tree)
    os.utime(tree / "csrc" / "gemm.cuh")
    build(tree)
    stages = [file.stem for file in CSRC.glob("stages/*.cu")]
    assert rebuilt(tree, before) == sorted([*stages, "stages"])


@needs_git
def test_build_info_has_commit_and_dirty_flag(tree):
    """The library says which commit it is of, and whether tracked files had been changed."""
    license = tree / "LICENSE"
    text = license.read_text()

    def info():
        build(tree)
        found = build_info(tree / "torch_sgemm")
        return found["COMMIT"], found["DIRTY"]

    head = git(tree, "rev-parse", "HEAD")
    assert re.fullmatch("[0-9a-f]{40}", head)
    assert info() == (head, False)
    try:
        license.write_text(text + "changed\n")
        assert info() == (head, True)
    finally:
        license.write_text(text)
    assert info() == (head, False)


# ---- the wheel ----------------------------------------------------------------------------------


@needs_pip
def test_wheel_s_name_and_contents(wheel):
    """One wheel for every Python from 3.10 on; everything that is needed, and nothing else."""
    name = re.fullmatch(r"torch_sgemm-(\d+\.\d+\.\d+)-1cpu-cp310-abi3-linux_\w+\.whl", wheel.name)
    assert name
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        metadata = file.read(f"torch_sgemm-{name[1]}.dist-info/METADATA").decode()
        description = file.read(f"torch_sgemm-{name[1]}.dist-info/WHEEL").decode()
    modules = {f"torch_sgemm/{path.name}" for path in (ROOT / "torch_sgemm").glob("*.py")}
    rest = names - {x for x in names if x.startswith(f"torch_sgemm-{name[1]}.dist-info/")}
    assert rest == modules | {
        "torch_sgemm/_C.abi3.so",
        "torch_sgemm/_build_info.py",
        "torch_sgemm/py.typed",
    }
    assert f"torch_sgemm-{name[1]}.dist-info/licenses/LICENSE" in names
    assert "Root-Is-Purelib: false" in description
    assert "License-Expression: BSD-3-Clause" in metadata
    assert re.search(r"^Requires-Dist: torch>=2\.11$", metadata, re.MULTILINE)
    # What only the developers need is no dependency.
    assert re.findall(r"^Requires-Dist: (?!torch)[^;]*$", metadata, re.MULTILINE) == []


@needs_pip
def test_wheel_installs_and_imports(wheel, tmp_path):
    """pip puts it into an empty folder, and from another folder it is imported and right."""
    site = tmp_path / "site"
    pip = ("-m", "pip", "install", "--no-deps", "--no-index", "--target", site)
    code, out, errors = python(*pip, wheel, cwd=tmp_path)
    assert code == 0, out + errors
    require_right(site, tmp_path)
    info = build_info(site / "torch_sgemm")
    assert info["NO_CUDA"].startswith("TORCH_SGEMM_CUDA=0")


# ---- imports that cannot work -------------------------------------------------------------------


def import_error(package, before="", chained=False):
    """The one sentence of the ImportError that `import torch_sgemm` gives after `before`."""
    code, _, errors = script(
        f"import torch\n{before}\nimport torch_sgemm", package.parent, package.parent
    )
    assert code == 1, "it was imported"
    last = errors.splitlines()[-1]
    assert last.startswith("ImportError: "), errors
    assert chained or errors.count("Traceback") == 1
    return last.removeprefix("ImportError: ")


def change_info(package, **changes):
    text = (package / "_build_info.py").read_text()
    for name, value in changes.items():
        text, count = re.subn(rf"^{name} = .*$", f"{name} = {value!r}", text, flags=re.MULTILINE)
        assert count == 1, name
    (package / "_build_info.py").write_text(text)


def test_unspoilt_package_is_imported(package, tmp_path):
    """The control of the tests below."""
    require_right(tmp_path, tmp_path)
    with pytest.raises(AssertionError, match="it was imported"):
        import_error(package)


@pytest.mark.parametrize("missing", ["_C.abi3.so", "_build_info.py"])
def test_missing_library_is_one_sentence(package, missing):
    """A checkout that was not built, or only half."""
    (package / missing).unlink()
    text = import_error(package)
    assert text.startswith(f"torch_sgemm is not built in {package}: ")
    assert "pip install ." in text


@pytest.mark.parametrize("has", ["'99.0'", "None"])
def test_library_for_another_cuda_is_one_sentence(package, has):
    """Built for CUDA 12, and torch has another one, or none."""
    change_info(package, CUDA="12.8", VERSION="0.1.0+cu12", TORCH="2.11.0+cu128")
    text = import_error(package, before=f"torch.version.cuda = {has}")
    assert text.startswith(
        "torch_sgemm 0.1.0+cu12 was built for CUDA 12 with torch 2.11.0+cu128, but torch "
        f"{torch.__version__} has {'no CUDA' if has == 'None' else 'CUDA 99'}: build "
    )


@pytest.mark.parametrize("version", ["2.10.1+cu128", "2.9.0", "1.13.1"])
def test_old_torch_is_one_sentence(package, version):
    """The stable ABI that the library uses begins with torch 2.11; 2.9 is older, not newer."""
    text = import_error(package, before=f"torch.__version__ = {version!r}")
    assert text == f"torch_sgemm needs torch >= 2.11, this is torch {version}"


def test_newer_torch_is_imported(package, tmp_path):
    """Other torch versions from 2.11 on are fine, releases or not."""
    for version in ("2.11.0", "2.100.0a0+git123", "3.0"):
        code = f"import torch\ntorch.__version__ = {version!r}\nimport torch_sgemm\nprint('ok')"
        assert printed(code, tmp_path, tmp_path) == "ok\n"


@pytest.fixture
def unloadable(package):
    """The ImportError of a library in which a symbol is missing that torch once had."""
    library, source = package / "_C.abi3.so", package / "x.c"
    source.write_text("extern int torch_renamed_it; int *x = &torch_renamed_it;\n")
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", source, "-o", library], check=True)
    return import_error(package, chained=True)


def test_library_that_does_not_load_is_one_sentence(unloadable):
    """It names the versions that do not go together, and the file."""
    assert re.match(
        rf"torch_sgemm \d+\.\d+\.\d+\+cpu, built with torch {re.escape(torch.__version__)}, "
        rf"does not load under torch {re.escape(torch.__version__)}\b.*\bbuild\b.*_C\.abi3\.so",
        unloadable,
    )


def test_library_that_does_not_load_says_what_the_loader_said(unloadable):
    """The name of the missing symbol is what a bug report needs."""
    assert "torch_renamed_it" in unloadable


# ---- what an import does ------------------------------------------------------------------------

NO_CUDA_CALLS = """
import torch
from pathlib import Path

def refuse(*args, **kwargs):
    raise AssertionError("a CUDA call")

names = [(torch.cuda, n) for n in ("_lazy_init", "is_available", "device_count", "current_device",
                                   "get_device_capability", "get_device_properties", "init")]
names += [(torch._C, n) for n in ("_cuda_init", "_cuda_getDeviceCount", "_cuda_getDevice",
                                  "_cuda_getCurrentStream")]
for module, name in names:
    if hasattr(module, name):
        setattr(module, name, refuse)

def libraries():
    return {Path(line.split()[-1]).name for line in open("/proc/self/maps") if ".so" in line}

before = libraries()
import torch_sgemm
new = libraries() - before
driver = any(name.startswith("libcuda.so") for name in new)
print(torch.cuda.is_initialized(), "_C.abi3.so" in new, driver)
try:
    torch.zeros(1, device="cuda")
    print("no call was refused")
except (AssertionError, RuntimeError) as error:
    print(error)
try:
    torch.cuda.device_count()
except AssertionError as error:
    print(error)
"""


def test_import_makes_no_cuda_call(tree, tmp_path):
    """Neither torch's CUDA functions nor the driver are touched by the import."""
    first, _, last = printed(NO_CUDA_CALLS, tree, tmp_path).splitlines()
    assert first == "False True False"
    assert last == "a CUDA call"  # the patches work


FORK = """
import os, signal
import torch, torch_sgemm
child = os.fork()
if child == 0:
    signal.alarm(60)
    a = torch.arange(1200.0).reshape(30, 40)
    right = all(torch.equal(stage(a, a.t()), a @ a.t()) for stage in torch_sgemm.STAGES.values())
    fine = right and not torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork()
    os._exit(0 if fine else 1)
print(os.waitpid(child, 0)[1])
"""


def test_import_before_fork(tree, tmp_path):
    """A worker process that is forked after the import computes, and may still use CUDA."""
    assert printed(FORK, tree, tmp_path) == "0\n"


# ---- the library as an ELF file -----------------------------------------------------------------


def symbols(library, which):
    out = subprocess.run(["nm", "-D", which, library], capture_output=True, text=True, check=True)
    return [(line.split()[-2], line.split()[-1]) for line in out.stdout.splitlines()]


def exports(library):
    return [name for _, name in symbols(library, "--defined-only")]


def python_symbols(library):
    return [
        name
        for _, name in symbols(library, "--undefined-only")
        if re.match(r"_?Py[A-Z_]|PyInit", name)
    ]


def needed(library):
    out = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True)
    return re.findall(r"\(NEEDED\).*\[(.*)\]", out.stdout)


@pytest.fixture(params=["CPU-only", "in place"])
def any_library(request):
    """The library built here, and the one of the working tree, usually with CUDA."""
    if request.param == "CPU-only":
        return request.getfixturevalue("tree") / "torch_sgemm" / "_C.abi3.so"
    library = ROOT / "torch_sgemm" / "_C.abi3.so"
    if not library.exists():
        pytest.skip("the working tree is not built")
    return library


@needs_binutils
def test_library_exports_two_functions(any_library):
    """Nothing of ours can clash with another extension's symbols."""
    assert exports(any_library) == ["torch_sgemm_model", "torch_sgemm_plans", "torch_sgemm_stages"]


@needs_binutils
def test_library_is_of_no_python_version(any_library):
    """No libpython, and no symbol of Python's: the file fits every version."""
    assert python_symbols(any_library) == []
    assert not any(name.startswith("libpython") for name in needed(any_library))


@needs_binutils
def test_library_needs_no_driver(any_library):
    """libcuda is on machines with a driver only, and nobody builds or imports on those alone."""
    names = needed(any_library)
    assert any(name.startswith("libtorch_cpu.so") for name in names)
    assert not any(name.startswith(("libcuda.so", "libnvidia")) for name in names)


@needs_binutils
def test_cpu_only_library_needs_nothing_of_cuda(tree):
    """A CPU-only build loads under a torch without CUDA."""
    names = needed(tree / "torch_sgemm" / "_C.abi3.so")
    assert not any(re.match(r"lib(cu|nv|torch_cuda|c10_cuda)", name) for name in names), names


@needs_binutils
def test_elf_checks_notice(tmp_path):
    """A library with an export, a Python symbol and a needed library that are not allowed."""
    (tmp_path / "cuda.c").write_text("void cuInit(void) {}\n")
    (tmp_path / "x.c").write_text(
        "void cuInit(void);\nvoid *PyLong_FromLong(long);\n"
        "void *ours(void) { cuInit(); return PyLong_FromLong(1); }\n"
    )
    shared = ["g++", "-x", "c", "-shared", "-fPIC"]
    driver = tmp_path / "libcuda.so.1"
    subprocess.run([*shared, tmp_path / "cuda.c", "-o", driver], check=True)
    bad = tmp_path / "bad.so"
    link = ["-x", "none", driver, "-Wl,--no-as-needed"]
    subprocess.run([*shared, tmp_path / "x.c", *link, "-o", bad], check=True)
    assert exports(bad) == ["ours"]
    assert python_symbols(bad) == ["PyLong_FromLong"]
    assert any(name.endswith("libcuda.so.1") for name in needed(bad))


SOURCES = [*ROOT.glob("csrc/*.cpp"), *ROOT.glob("csrc/host/*.cpp")]


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.name)
def test_sources_are_cpp17(file):
    """torch 2.11, the oldest supported, builds extensions as C++17; newer ones as C++20."""
    include = Path(torch.__file__).parent / "include"
    flags = ["-std=c++17", "-fsyntax-only", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    command = ["g++", *flags, f"-I{include}", '-DSGEMM_NO_CUDA="a test"', str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
