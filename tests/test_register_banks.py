"""benchmarks/register_banks.py, and the order that ptxas gave the ring kernels' multiply-adds."""

import re

import pytest
import register_banks

from torch_sgemm import _build_info


def ffma(*operands):
    return f"FFMA R9, {', '.join(operands)}"


@pytest.mark.parametrize(
    ("code", "waited"),
    [
        ([("R0", "R1", "R3")], 1),  # R1 and R3 are odd
        ([("R0", "R2", "R4")], 2),
        ([("R0", "R1", "RZ")], 0),
        ([("R0.reuse", "R1", "R3"), ("R0", "R2", "R5")], 1),  # the second R0 is kept
        ([("R0.reuse", "R1", "R3"), ("R2", "R0", "R5")], 1 + 1),  # but not for another place
        ([("R0.reuse", "R1", "R3"), ("R7", "R1", "R2"), ("R0", "R4", "R1")], 1 + 1 + 1),  # nor on
    ],
)
def test_conflicts_are_counted(code, waited):
    assert register_banks.conflicts(ffma(*operands) for operands in code) == waited


def sass(ffmas, more=()):
    body = [*[ffma("R0", "R1", "R3")] * ffmas, *more, "@P0 BRA 0x10"]
    return [f"        /*{16 * i:04x}*/    {text} ;   /* 0x0 */" for i, text in enumerate(body, 1)]


def test_the_main_loop_is_found_with_its_spills():
    loop = register_banks.main_loop("k", sass(600, ["STL [R1], R2", "@!P1 LDL R2, [R1]"]))
    assert (loop.ffmas, loop.conflicts, loop.spills, loop.instructions) == (600, 600, 2, 603)
    assert register_banks.main_loop("k", sass(400)) is None


def test_a_missing_file_is_told(capsys):
    with pytest.raises(SystemExit):
        register_banks.main(["nowhere.so"])
    assert "there is no file nowhere.so" in capsys.readouterr().err


@pytest.fixture(scope="module")
def rings():
    """{(BM, BN): the main loops of its ring kernels}"""
    tool = register_banks.cuobjdump()
    if tool is None:
        pytest.skip("no cuobjdump")
    if not register_banks.LIBRARY.exists():
        pytest.skip("the package is not built in place")
    if "9.0a" not in _build_info.ARCHS:
        pytest.skip("the build has no code for compute capability 9.0a")
    found = {}
    for loop in register_banks.loops(register_banks.LIBRARY, tool):
        if tile := re.search(r"4ringINS0_8RingTileILi(\d+)ELi(\d+)E", loop.kernel):
            found.setdefault((int(tile[1]), int(tile[2])), []).append(loop)
    return found


def test_every_ring_kernel_has_a_main_loop_without_spills(rings):
    assert {tile: len(some) for tile, some in rings.items()} == {
        (256, 128): 2,
        (128, 128): 2,
        (128, 64): 2,
        (64, 64): 2,
    }
    assert [loop for some in rings.values() for loop in some if loop.spills] == []


def test_few_multiply_adds_of_the_ring_kernels_wait_for_registers(rings):
    """An edit somewhere else can change which bank the sums lie in, and the rate from 0.06 to 0.5.
    Where warps share a warp tile the loop is short, and what is around it counts too."""
    for tile, some in rings.items():
        for loop in some:
            assert loop.rate < (0.09 if tile == (256, 128) else 0.15), (tile, loop)
