"""What a call puts on the GPU, and whose kernels these are."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def randn(*shape, device="cuda"):
    return torch.randn(shape, device=device)


def device_work(call) -> list[str]:
    """Names of the kernels, copies and fills that call() puts on the GPU, warmed up before."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    return [e.name for e in recorded.events() if e.device_type == on_gpu]


def is_ours(name: str, of: str = "matmul") -> bool:
    """Whether a kernel is one of the product ops', or of the stage `of`."""
    return f"sgemm::{of}::" in name


def require_ours_alone(call) -> None:
    """A kernel of the product ops, with one that adds up where K is in parts, and one that copies
    operands to panels; no copy of torch's, nothing else."""
    names = device_work(call)
    assert 1 <= len(names) <= 3, names
    assert all(map(is_ours, names)), names


def allocations(call) -> int:
    """How often call() asks torch's allocator for memory, warmed up before."""
    call()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call()
    return torch.cuda.memory_stats()["allocation.all.allocated"] - before
