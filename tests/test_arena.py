"""The helpers of the other tests detect the faults that they are there for."""

import check
import pytest
import torch
from arena import LAYOUTS, Arena, place, require_right


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arena_shows_any_write_outside_its_matrix(layout):
    rows, cols = 5, 6
    arena = Arena(rows, cols, layout)
    assert arena.view.shape == (rows, cols)
    assert arena.view.isnan().all()
    arena.view.zero_()
    arena.assert_untouched()
    strides, storage = arena.view.stride(), arena.view.storage_offset()
    last = (rows - 1) * strides[0] + (cols - 1) * strides[1]
    for planted in (-1, last + 1, -64, last + 64):
        arena = Arena(rows, cols, layout)
        arena.view.as_strided((1,), (1,), storage + planted).fill_(float("nan"))  # another NaN
        with pytest.raises(AssertionError, match=f"the first {planted} from its start"):
            arena.assert_untouched()


def test_arena_shows_a_write_between_the_rows():
    arena = Arena(5, 6, "padded")
    arena.view.as_strided((1,), (1,), arena.view.storage_offset() + 6).fill_(0)
    with pytest.raises(AssertionError, match="the first 6 from its start"):
        arena.assert_untouched()


@pytest.mark.parametrize("layout", ["padded", "column_slice", "every_other_row"])
def test_poison_beyond_a_row_shows_in_the_result(layout):
    """An op that reads one column too many, as a K tail without a guard does."""

    def reads_too_far(a, b, c=None, *, alpha, beta, out):
        wider = a.as_strided((a.shape[0], a.shape[1] + 1), a.stride())
        return wider @ torch.cat([b, torch.zeros_like(b[:1])])

    with pytest.raises(check.CheckError, match="is nan"):
        require_right(reads_too_far, place(torch.ones(4, 3), layout).view, torch.ones(3, 5))


def test_an_output_that_is_not_written_shows():
    def forgets_the_last_row(a, b, c=None, *, alpha, beta, out):
        out[:-1].copy_((a @ b)[:-1])
        return out

    with pytest.raises(check.CheckError, match=r"wrong in 5 of 20 entries: C\[3, 0\] is nan"):
        require_right(
            forgets_the_last_row, torch.ones(4, 3), torch.ones(3, 5), out=Arena(4, 5).view
        )


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_offsets_leave_the_base_pointer_unaligned(offset):
    layout = f"offset{offset}" if offset else "contiguous"
    assert Arena(3, 4, layout).view.data_ptr() % 16 == 4 * offset
