"""Builds torch_sgemm/_C.abi3.so: the stages for CUDA and for the CPU, and the op layer.

Environment:
  TORCH_SGEMM_CUDA       1: a build without CUDA is an error; 0: leave CUDA out; unset: CUDA if
                         nvcc is found.
  TORCH_CUDA_ARCH_LIST   As for any torch extension. Unset: the GPUs of this machine; where there
                         are none, 9.0a for a build in place and all we support for a wheel.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

ROOT = Path(__file__).parent
VERSION = "0.1.0"
ALL_ARCHS = "8.0;8.6;8.9;9.0a;10.0;12.0+PTX"
IN_ORDER = "/ring_"  # CUDA files with this in their path
OLDEST_TORCH = "0x020b000000000000"  # 2.11.0, for the stable ABI's headers


def find_cuda():
    """(nvcc's CUDA version, "") or (None, the reason why there is none)."""
    if os.environ.get("TORCH_SGEMM_CUDA", "") not in ("", "0", "1"):
        sys.exit(f"TORCH_SGEMM_CUDA must be 0 or 1, got {os.environ['TORCH_SGEMM_CUDA']}")
    if os.environ.get("TORCH_SGEMM_CUDA") == "0":
        return None, "TORCH_SGEMM_CUDA=0 was set when it was built"
    if not torch.version.cuda:
        return None, f"it was built with torch {torch.__version__}, which has no CUDA"
    nvcc = Path(CUDA_HOME or "/nonexistent") / "bin" / "nvcc"
    if not nvcc.exists():
        return (
            None,
            "nvcc was not found when it was built; install the CUDA toolkit or set CUDA_HOME",
        )
    if not (nvcc.parent.parent / "include" / "cublas_v2.h").exists():
        return None, "cublas_v2.h was not beside nvcc when it was built; install cuBLAS's headers"
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"release (\d+\.\d+)", text)[1]
    if version.split(".")[0] != torch.version.cuda.split(".")[0]:
        return None, (
            f"nvcc was CUDA {version} and torch {torch.__version__} CUDA {torch.version.cuda} when "
            "it was built; install a toolkit of torch's CUDA major version, or a torch for this one"
        )
    return version, ""


def find_archs():
    if os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return os.environ["TORCH_CUDA_ARCH_LIST"]
    here = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    if here:
        return ";".join(f"{major}.{minor}" + "a" * (major == 9) for major, minor in sorted(here))
    return ALL_ARCHS if "bdist_wheel" in sys.argv else "9.0a"


def write_if_changed(path, text):
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def host_stages():
    """Every stage once more, for the C++ compiler: a file each that includes the .cu file."""
    shims = []
    for stage in sorted(ROOT.glob("csrc/stages/*.cu")):
        shim = ROOT / "build" / "host" / f"{stage.stem}.cpp"
        write_if_changed(shim, f'#define SGEMM_HOST\n#include "../../csrc/stages/{stage.name}"\n')
        shims.append(shim)
    return shims


def git(*args):
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def compiler():
    """nvcc, but that ptxas does not move the instructions of the files that ask for it.

    A kernel whose speed is in the order of its multiply-adds (csrc/matmul/ieee/ring.cuh says why)
    has to keep it: at -O1, ptxas follows the source.
    """
    nvcc = os.environ.get("PYTORCH_NVCC") or str(Path(CUDA_HOME) / "bin" / "nvcc")
    path = ROOT / "build" / "nvcc"
    write_if_changed(
        path,
        f"""#!/bin/sh
for argument; do
  case "$argument" in *{IN_ORDER}*.cu) set -- "$@" -Xptxas -O1; break ;; esac
done
exec {nvcc} "$@"
""",
    )
    path.chmod(0o755)
    return str(path)


CUDA, NO_CUDA = find_cuda()
ARCHS = find_archs() if CUDA else ""
TOOLKIT = f"cu{CUDA.split('.')[0]}" if CUDA else "cpu"
if CUDA:
    os.environ["TORCH_CUDA_ARCH_LIST"] = ARCHS
    os.environ["PYTORCH_NVCC"] = compiler()
elif os.environ.get("TORCH_SGEMM_CUDA") == "1":
    sys.exit(f"TORCH_SGEMM_CUDA=1, but no CUDA build of torch_sgemm is possible: {NO_CUDA}")


class Build(BuildExtension):
    """Writes down beside the library what it was built from and with."""

    def run(self):
        print(f"torch_sgemm: {f'CUDA {CUDA} for {ARCHS}' if CUDA else f'CPU only, as {NO_CUDA}'}")
        super().run()
        status = git("status", "--porcelain", "--untracked-files=no")
        info = {
            "VERSION": f"{VERSION}+{TOOLKIT}",
            "TORCH": torch.__version__,
            "TORCH_CUDA": torch.version.cuda,
            "CUDA": CUDA,
            "NO_CUDA": NO_CUDA,
            "ARCHS": ARCHS,
            "COMMIT": git("rev-parse", "HEAD"),
            "DIRTY": None if status is None else status != "",
        }
        lines = [
            '"""Written by setup.py: what the library beside this file was built from and with."""',
            "",
        ]
        lines += [f"{name} = {value!r}" for name, value in info.items()]
        path = Path(self.get_ext_fullpath(self.extensions[0].name)).with_name("_build_info.py")
        write_if_changed(path, "\n".join(lines) + "\n")


def configuration():
    """A file that changes where the library has to be linked again although no source changed."""
    path = ROOT / "build" / "configuration.txt"
    write_if_changed(path, f"{CUDA=} {NO_CUDA=} {ARCHS=} {torch.__version__=} {sys.version=}\n")
    return path


def extension():
    common = [f"-DTORCH_TARGET_VERSION={OLDEST_TORCH}", "-O3"]
    if CUDA:
        common += ["-DUSE_CUDA", f'-DSGEMM_ARCHS="{ARCHS}"']
    else:
        common += [f'-DSGEMM_NO_CUDA="{NO_CUDA}"']
    folders = ("csrc", "csrc/host", "csrc/matmul")
    sources = [*(path for name in folders for path in ROOT.glob(f"{name}/*.cpp")), *host_stages()]
    if CUDA:
        folders = ("csrc", "csrc/stages", "csrc/matmul")
        sources += [path for name in folders for path in ROOT.glob(f"{name}/*.cu")]
        sources += ROOT.glob("csrc/matmul/*/*.cu")
    return (CUDAExtension if CUDA else CppExtension)(
        "torch_sgemm._C",
        sorted(os.path.relpath(path, ROOT) for path in sources),
        depends=[
            os.path.relpath(path, ROOT)
            for path in [configuration(), ROOT / "setup.py", *ROOT.glob("csrc/**/*")]
            if path.is_file()
        ],
        extra_compile_args={
            "cxx": [*common, "-g0", "-fvisibility=hidden", "-Wno-unknown-pragmas"],
            "nvcc": [*common, "-Xcompiler=-fvisibility=hidden"],
        },
        extra_link_args=["-Wl,--version-script=csrc/exports.map"],
        libraries=["cublas"] if CUDA else [],
        py_limited_api=True,
    )


# Run from the project's folder, whoever calls: sources are named relative to it.
os.chdir(ROOT)
setup(
    version=VERSION,
    ext_modules=[extension()],
    cmdclass={"build_ext": Build},
    # In a wheel's name, but not in its version: an sdist is for every toolkit.
    options={"bdist_wheel": {"py_limited_api": "cp310", "build_number": f"1{TOOLKIT}"}},
)
