"""Matrices inside buffers full of NaN, so that what is read or written beyond a matrix shows."""

import check
import torch
from torch import Tensor

POISON = 0x7FC5EED5  # a quiet NaN that no arithmetic makes

#: Where the elements of a (rows, cols) matrix lie: row stride, column stride, offset from a
#: 256-byte boundary. An offset of 1, 2 or 3 leaves the base pointer unfit for 16-byte loads.
LAYOUTS = {
    "contiguous": lambda rows, cols: (cols, 1, 0),
    "padded": lambda rows, cols: (cols + 5, 1, 0),
    "padded_by_16_bytes": lambda rows, cols: (cols + 4, 1, 0),
    "column_slice": lambda rows, cols: (cols + 7, 1, 3),
    "every_other_row": lambda rows, cols: (2 * cols, 1, 0),
    "every_other_column": lambda rows, cols: (2 * cols, 2, 0),
    "transposed": lambda rows, cols: (1, rows, 0),
    "padded_transposed": lambda rows, cols: (1, rows + 3, 1),
    "offset1": lambda rows, cols: (cols, 1, 1),
    "offset2": lambda rows, cols: (cols, 1, 2),
    "offset3": lambda rows, cols: (cols, 1, 3),
}


class Arena:
    """A (rows, cols) matrix, `view`, that holds NaN and has nothing but NaN around it."""

    def __init__(self, rows: int, cols: int, layout: str = "padded", device: str = "cpu"):
        row, col, offset = LAYOUTS[layout](rows, cols)
        span = (rows - 1) * row + (cols - 1) * col + 1 if rows and cols else 0
        guard = 256 * (1 + max(row, col))  # more than a block tile's rows, on either side
        bits = torch.full((2 * guard + offset + span,), POISON, dtype=torch.int32, device=device)
        self.start = guard + offset
        self._bits = bits
        self._outside = torch.ones_like(bits, dtype=torch.bool)
        place = ((rows, cols), (row, col), self.start)
        self._outside.as_strided(*place).fill_(False)
        self.view = bits.view(torch.float32).as_strided(*place)

    def assert_untouched(self) -> None:
        """Nothing outside the view was written, bit for bit."""
        written = (self._outside & (self._bits != POISON)).nonzero().flatten() - self.start
        assert written.numel() == 0, (
            f"{written.numel()} elements outside the matrix of shape {tuple(self.view.shape)} were "
            f"written, the first {written[0].item()} from its start"
        )


def place(values: Tensor, layout: str = "padded") -> Arena:
    """An arena whose view holds values."""
    arena = Arena(*values.shape, layout, device=values.device)
    arena.view.copy_(values)
    return arena


def require_right(op, a, b, c=None, *, alpha=1.0, beta=0.0, out=None, what="the result") -> Tensor:
    """Calls op and holds the result against check's error rule; out and the result are one."""
    reference = check.reference(a, b, c, alpha, beta)  # before the call: out may be c
    result = op(a, b, c, alpha=alpha, beta=beta, out=out)
    check.require(result, reference, what)
    assert out is None or result is out
    return result


def require_untouched(*arenas: Arena) -> None:
    for arena in arenas:
        arena.assert_untouched()


def integers(*shape: int, device: str = "cpu", limit: int = 8) -> Tensor:
    """Small whole numbers as float32: their products and short sums are exact."""
    return torch.randint(-limit, limit + 1, shape, device=device).float()
