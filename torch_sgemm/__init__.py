"""FP32 matrix multiplication for PyTorch, written to be read and to be used.

``torch.ops.sgemm.stage0`` ... are the steps of the ladder, each a CUDA kernel in a file of its own;
on CPU tensors the same kernels run on the CPU. ``STAGES`` holds them by name, ``cublas`` is the
reference.
"""

from torch_sgemm._library import VERSION as __version__
from torch_sgemm.stages import STAGES, cublas

__all__ = ["STAGES", "__version__", "cublas"]
