"""Loads the C++ library, or says in one sentence why it cannot be."""

import ctypes
from pathlib import Path

import torch

OLDEST_TORCH = (2, 11)
LIBRARY = Path(__file__).with_name("_C.abi3.so")


def _load() -> tuple[str, tuple[str, ...]]:
    """Registers the ops under torch.ops.sgemm; returns the version and the names of the stages."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(f"torch_sgemm needs torch >= {oldest}, this is torch {torch.__version__}")
    try:
        from torch_sgemm import _build_info as build
    except ImportError:
        build = None
    if build is None or not LIBRARY.exists():
        raise ImportError(
            f"torch_sgemm is not built in {LIBRARY.parent}: run `make build` in its repository, "
            "or `pip install .`"
        )
    ours, theirs = (v and v.split(".")[0] for v in (build.CUDA, torch.version.cuda))
    if ours and ours != theirs:
        raise ImportError(
            f"torch_sgemm {build.VERSION} was built for CUDA {ours} with torch {build.TORCH}, but "
            f"torch {torch.__version__} has {f'CUDA {theirs}' if theirs else 'no CUDA'}: "
            "build torch_sgemm again with this torch"
        )
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        raise ImportError(
            f"torch_sgemm {build.VERSION}, built with torch {build.TORCH}, does not load under "
            f"torch {torch.__version__}; build it again with this torch "
            f"({error.__cause__ or error})"
        ) from None
    names = ctypes.CDLL(str(LIBRARY)).torch_sgemm_stages
    names.restype = ctypes.c_char_p
    return build.VERSION, tuple(names().decode().split())


VERSION, STAGES = _load()


def check_devices(**tensors: torch.Tensor | None) -> None:
    """For fakes: a meta tensor among real ones gets there; its result would be made of nothing."""
    (first, a), *others = tensors.items()
    for name, t in others:
        torch._check(
            t is None or t.device == a.device,
            lambda name=name, t=t: (
                f"all tensors must be on the same device, but {first} is on {a.device} and {name} "
                f"is on {t.device}"
            ),
        )
