"""Loads the C++ library, or says in one sentence why it cannot be."""

import ctypes
from pathlib import Path

import torch

OLDEST_TORCH = (2, 11)
LIBRARY = Path(__file__).with_name("_C.abi3.so")


def _torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def load() -> tuple[str, ...]:
    """Registers the ops under torch.ops.sgemm and returns the names of the stages."""
    if _torch_version() < OLDEST_TORCH:
        raise ImportError(
            f"torch_sgemm needs torch >= {'.'.join(map(str, OLDEST_TORCH))}, this is torch {torch.__version__}"
        )
    try:
        from torch_sgemm import _build_info as build
    except ImportError:
        build = None
    if build is None or not LIBRARY.exists():
        raise ImportError(
            f"torch_sgemm is not built in {LIBRARY.parent}: run `make build` in its repository, or `pip install .`"
        )
    built_major = build.CUDA and build.CUDA.split(".")[0]
    torch_major = torch.version.cuda and torch.version.cuda.split(".")[0]
    if built_major and built_major != torch_major:
        raise ImportError(
            f"torch_sgemm {build.VERSION} was built for CUDA {built_major} with torch {build.TORCH}, but torch "
            f"{torch.__version__} has {f'CUDA {torch_major}' if torch_major else 'no CUDA'}: build it again here"
        )
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        raise ImportError(
            f"torch_sgemm {build.VERSION}, built with torch {build.TORCH}, does not load under torch "
            f"{torch.__version__}; build it again with this torch ({error})"
        ) from error
    names = ctypes.CDLL(str(LIBRARY)).torch_sgemm_stages
    names.restype = ctypes.c_char_p
    return tuple(names().decode().split())
