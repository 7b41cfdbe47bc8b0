"""What a product op would do, and why."""

import ctypes
import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_sgemm import _library, _precision

#: What is assumed where no GPU is there to be asked: an H200.
SMS, MEMORY, CAPABILITY = 132, 139 << 30, (9, 0)


@dataclass(frozen=True)
class Plan:
    """How one product is computed. ``str`` of it is a line to be read."""

    #: a block tile ("64x128"), with producer warps on compute capability 9.0 ("ring256x128"), or
    #: "dot" or "axpy" for few rows
    kernel: str
    parts: int  #: of K; each is computed apart, then they are added up in order
    streamed: bool  #: whether blocks share the last tiles' K out among them all; parts is 2 then
    transposed: bool  #: whether out^T = B^T @ A^T is computed
    vector: bool  #: whether operands are read 16 bytes at a time
    workspace_bytes: int  #: beside the result; from torch's allocator
    seconds: float  #: as predicted: a model's figure, that only the choice rests on
    reason: str

    def __str__(self) -> str:
        split = f", K in {self.parts} parts" if self.parts > 1 and not self.streamed else ""
        space = f", {self.workspace_bytes:,} bytes of workspace" if self.workspace_bytes else ""
        return f"{self.kernel}{split}{space}, {1e6 * self.seconds:.1f} us predicted: {self.reason}"


_plans = ctypes.CDLL(str(_library.LIBRARY)).torch_sgemm_plans
_plans.restype = ctypes.c_char_p
_int64 = ctypes.c_int64


def candidates(
    a: Tensor | Sequence[int], b: Tensor | Sequence[int], *, precision: str | None = None
) -> list[Plan]:
    """Every way to compute a @ b, the one that is taken first; as explain()."""
    _precision.resolved(precision)
    a, b = (t if isinstance(t, Tensor) else torch.empty(tuple(t), device="meta") for t in (a, b))
    if a.dim() != b.dim() or a.dim() not in (2, 3) or a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"a and b must be matrices that can be multiplied, or batches of them, got shapes "
            f"{tuple(a.shape)} and {tuple(b.shape)}"
        )
    if a.dim() == 3 and a.shape[0] != b.shape[0]:
        raise ValueError(
            f"a and b must be batches of as many matrices, got {a.shape[0]} and {b.shape[0]}"
        )
    a, b = (t.unsqueeze(0) if t.dim() == 2 else t for t in (a, b))
    (batch, M, K), N = a.shape, b.shape[2]
    if 0 in (batch, M, N):
        raise ValueError(f"the result of shape {(batch, M, N)} is empty: nothing is computed")
    sms, memory, capability = SMS, MEMORY, CAPABILITY
    if a.is_cuda:
        properties = torch.cuda.get_device_properties(a.device)
        sms, memory = properties.multi_processor_count, properties.total_memory
        capability = properties.major, properties.minor
    aligned = 4 | sum(bit for bit, t in ((1, a), (2, b)) if t.is_meta or t.data_ptr() % 16 == 0)
    strides = ((_int64 * 3)(*stride) for stride in (a.stride(), b.stride(), (M * N, N, 1)))
    found = _plans(
        *(_int64(size) for size in (batch, M, N, K)),
        *strides,
        *(aligned, sms, _int64(max(1 << 30, memory // 16) // 4), capability == (9, 0)),
    )
    return [Plan(**plan) for plan in json.loads(found.decode())]


def explain(
    a: Tensor | Sequence[int], b: Tensor | Sequence[int], *, precision: str | None = None
) -> Plan:
    """The plan by which mm (or bmm, for three dimensions) would compute a @ b on CUDA.

    Args:
        a: (M, K) or (B, M, K): a tensor, whose strides and alignment count, or a shape, which
            stands for a contiguous one.
        b: (K, N) or (B, K, N).
        precision: as the ops'.

    Where a is no CUDA tensor, an H200 is assumed.

    Raises:
        ValueError: for shapes that cannot be multiplied, or an empty result.
    """
    return candidates(a, b, precision=precision)[0]
