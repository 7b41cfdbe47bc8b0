"""FP32 matrix multiplication for PyTorch, written to be read and to be used.

``mm``, ``addmm``, ``bmm``, ``baddbmm``, ``linear`` and ``matmul`` are torch's, in FP32 on CUDA by
kernels of our own; ``precision`` says how exact, ``explain`` how they would compute a product. They
are torch.ops.sgemm's too.

``torch.ops.sgemm.stage0`` ... are the steps of the ladder, each a CUDA kernel in a file of its own;
on CPU tensors the same kernels run on the CPU. ``STAGES`` holds them by name, ``cublas`` is the
reference.
"""

from torch_sgemm._library import VERSION as __version__
from torch_sgemm._precision import precision
from torch_sgemm.plan import Plan, explain
from torch_sgemm.products import addmm, baddbmm, bmm, linear, matmul, mm
from torch_sgemm.stages import STAGES, cublas

__all__ = [
    "STAGES",
    "Plan",
    "__version__",
    "addmm",
    "baddbmm",
    "bmm",
    "cublas",
    "explain",
    "linear",
    "matmul",
    "mm",
    "precision",
]
