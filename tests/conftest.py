"""What all tests share: the device, the stages, and a seed that depends on the test alone."""

import sys
import zlib
from pathlib import Path

import pytest
import torch

# An installed wheel comes first; without one the library that is built in place is tested.
sys.path.append(str(Path(__file__).parents[1]))

from adapters import PRODUCTS

from torch_sgemm import STAGES


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    return request.param


@pytest.fixture(params=list(STAGES))
def stage(request):
    """stage(a, b, c=None, *, alpha, beta, out=None); its __name__ is the op's. Tests may ask for a
    product op in its place."""
    return (dict(STAGES) | PRODUCTS)[request.param]


@pytest.fixture(autouse=True)
def _seed(request):
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
