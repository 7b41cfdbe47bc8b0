"""The product ops with the stages' signature, so that a stage's tests are theirs as well."""

import pytest

import torch_sgemm as ts


def mm(a, b, c=None, *, alpha=1.0, beta=0.0, out=None):
    """By mm where that is all, else by addmm."""
    if c is None and alpha == 1 and a.dtype == b.dtype:
        return ts.mm(a, b, out=out)
    c, beta = (a.new_zeros(()), 0.0) if c is None else (c, beta)
    return ts.addmm(c, a, b, alpha=alpha, beta=beta, out=out)


def bmm(a, b, c=None, *, alpha=1.0, beta=0.0, out=None):
    """By bmm where that is all, else by baddbmm: a batch of one."""
    into = None if out is None else out.unsqueeze(0)
    batch = a.unsqueeze(0), b.unsqueeze(0)
    if c is None and alpha == 1:
        result = ts.bmm(*batch, out=into)
    else:
        c, beta = (a.new_zeros(()), 0.0) if c is None else (c, beta)
        result = ts.baddbmm(c, *batch, alpha=alpha, beta=beta, out=into)
    return result.squeeze(0) if out is None else out


def linear(a, b, c=None, *, alpha=1.0, beta=0.0, out=None):
    """b is the weight's transpose; c is the bias where it can be."""
    if out is not None:
        return out.copy_(linear(a, b, c, alpha=alpha, beta=beta))
    if c is None:
        return alpha * ts.linear(a, b.t())
    if alpha == 1 and beta == 1 and c.dim() < 2 and (c.dim() == 0 or c.shape[0] == b.shape[1]):
        return ts.linear(a, b.t(), c)
    return alpha * ts.linear(a, b.t()) + beta * c


PRODUCTS = {"mm": mm, "bmm": bmm, "linear": linear}

#: For tests of the stages that are the product ops' as well; of alpha, beta and out, which linear
#: has not, those of the others.
products_too = pytest.mark.parametrize("stage", [*ts.STAGES, *PRODUCTS], indirect=True)
gemms_too = pytest.mark.parametrize("stage", [*ts.STAGES, "mm", "bmm"], indirect=True)
