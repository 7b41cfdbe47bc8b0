"""What headers and documents claim, against the counters that are committed among the results."""

import itertools
import re

import counters
import pytest
import report
import roofline

H200 = report.RESULTS / "nvidia-h200"
SIZE = 4096


def profile(size=SIZE):
    return counters.by_kernel(report.read_csv(H200 / "profile.csv"), size)


def header(stage):
    return report.stage_file(stage).read_text().split("#include")[0]


def per_multiply_add(values, instructions):
    return 32 * values[instructions] / values["multiply_adds"]


# stage: (words of its header, what a counter has to say to them)
CLAIMS = {
    ("stage0", "Slow now:  the threads of a warp read 32 rows of A: 32 sectors a request"): (
        # A in 32 sectors, B in one: 16.5 in the mean
        lambda v: 16 < v["global_load_sectors"] / v["global_load_requests"] < 17
    ),
    ("stage0", "two loads for each multiply-add"): (
        lambda v: 1.99 < per_multiply_add(v, "global_load_requests") < 2.01
    ),
    ("stage1", "B and C take 4 sectors a request, and A one"): (
        lambda v: (
            2.4 < v["global_load_sectors"] / v["global_load_requests"] < 2.6
            and v["global_store_sectors"] == pytest.approx(4 * v["global_store_requests"], rel=1e-4)
        )
    ),
    ("stage1", "Slow now:  no reuse: each value is loaded from global memory again"): (
        lambda v: 1.99 < per_multiply_add(v, "global_load_requests") < 2.01
    ),
    ("stage1b", "none: the warps and their addresses are those of stage 1"): (
        lambda v: all(
            v[name] == profile()["stage1"][name]
            for name in ("global_load_sectors", "global_load_requests", "global_store_sectors")
        )
    ),
    ("stage2", "one load feeds 16 threads"): (
        lambda v: 0.12 < per_multiply_add(v, "global_load_requests") < 0.13
    ),
    ("stage2", "2,176 bytes of shared memory"): lambda v: v["shared_bytes"] % 1024 == 2176 % 1024,
    ("stage2", "Slow now:  two shared loads for each multiply-add"): (
        lambda v: 1.99 < per_multiply_add(v, "shared_loads") < 2.01 and waits_for(v, "mio throttle")
    ),
    ("stage2b", "one load from global memory feeds 32 threads"): (
        lambda v: 0.062 < per_multiply_add(v, "global_load_requests") < 0.063
    ),
    ("stage2b", "Slow now:  two shared loads for each multiply-add"): (
        lambda v: 1.99 < per_multiply_add(v, "shared_loads") < 2.01 and waits_for(v, "mio throttle")
    ),
    ("stage3", "a warp skips every other column"): (
        lambda v: v["global_load_sectors"] == pytest.approx(8 * v["global_load_requests"], rel=1e-4)
    ),
    ("stage3", "Slow now:  shared memory still"): (
        lambda v: v["l1_pct"] > 90 and waits_for(v, "mio throttle")
    ),
    ("stage3", "one load for each multiply-add as written, and stores in 4-way conflict"): (
        # As written: the compiler merges some, so that there are fewer instructions.
        lambda v: (
            0.5 < per_multiply_add(v, "shared_loads") <= 1
            and 3.9 < v["shared_store_wavefronts"] / v["shared_stores"] < 4.2
        )
    ),
    ("stage4", "a value of Bs stays in a register for TM = 8 multiply-adds"): (
        # As written 9 loads for 8; the compiler joins neighbours along k.
        lambda v: per_multiply_add(v, "shared_loads") < 9 / 8
    ),
    ("stage4", "Slow now:  TM + 1 shared loads for each TM multiply-adds"): (
        lambda v: (
            6 * per_multiply_add(profile()["stage5"], "shared_loads")
            == pytest.approx(per_multiply_add(v, "shared_loads"), rel=0.01)
        )
    ),
    ("stage5", "Slow now:  the tiles are copied a float at a time: four times the instructions"): (
        lambda v: v["global_load_requests"] == 4 * profile()["stage6"]["global_load_requests"]
    ),
    ("stage6", "the transposing stores hit 16 of the 32 banks"): (
        # Four of two wavefronts each, and B's float4 in four: 12 / 5.
        lambda v: 2.35 < v["shared_store_wavefronts"] / v["shared_stores"] < 2.7
    ),
    ("stage6", "Slow now:  every warp's reads spread over the whole block tile"): (
        lambda v: load_wavefronts(v) > 4.9 and load_wavefronts(profile()["stage7"]) < 3.1
    ),
    ("stage7", "Slow now:  the transposing stores hit 8 of the 32 banks"): (
        lambda v: 3.9 < v["shared_store_wavefronts"] / v["shared_stores"] < 4.1
    ),
    ("stage8", "two stores still collide"): (
        # A's eight in two wavefronts, B's four float4 in four: 32 / 12.
        lambda v: 2.6 < v["shared_store_wavefronts"] / v["shared_stores"] < 2.8
    ),
    ("stage8", "Slow now:  a block loads or computes, never both"): (
        lambda v: waits_for_memory(v) > 2 * waits_for_memory(profile()["stage9"])
    ),
    ("stage9", "twice the shared memory, registers for A on its way"): (
        lambda v: (
            v["shared_bytes"] == 2 * profile()["stage8"]["shared_bytes"]
            and v["registers"] > profile()["stage8"]["registers"]
            and v["occupancy_pct"] < profile()["stage8"]["occupancy_pct"]
        )
    ),
    ("stage9", "Slow now:  tile, padding and launch bounds are still those that suited stages 7"): (
        lambda v: v["time"] > 1.03 * profile()["stage10"]["time"]
    ),
    ("stage9b", "the compiler had moved the loads forward with as many registers"): (
        lambda v: v["registers"] == profile()["stage9"]["registers"]
    ),
    ("stage9b", "Slow now:  tile, padding and launch bounds are still those"): (
        lambda v: v["time"] > 0.99 * profile()["stage9"]["time"]
    ),
    ("stage10", "one block an SM, whose 8 warps take nearly all of its registers"): (
        lambda v: 200 < v["registers"] <= 256 and v["occupancy_pct"] == pytest.approx(12.5, abs=1)
    ),
    ("stage10", "Slow now:  issue slots: instructions that are no multiply-adds"): (
        lambda v: v["issue_pct"] > 80 and v["issue_pct"] > v["fma_pct"] + 5
    ),
    ("stage3b", "half a warp a block, so half of every instruction issued does nothing"): (
        lambda v: v["threads_per_instruction"] == pytest.approx(16, abs=0.1)
    ),
}


def load_wavefronts(values):
    return values["shared_load_wavefronts"] / values["shared_loads"]


def waits_for_memory(values):
    return values["stall_long_scoreboard"] + values["stall_barrier"]


def waits_for(values, reason):
    return counters.top_stalls(values, 1).startswith(reason)


@pytest.mark.parametrize(("stage", "words"), CLAIMS, ids=lambda value: value[:40])
def test_what_a_header_claims_is_what_the_counters_say(stage, words):
    flat = re.sub(r"\s*\n//\s*", " ", header(stage))
    assert words in flat, "the header has changed: change its claim here too"
    assert CLAIMS[stage, words](profile()[stage])


def test_every_stage_has_a_claim_about_what_is_slow_now():
    stages = {stage for stage, words in CLAIMS if words.startswith("Slow now:")}
    known = set(profile()) - {"cublas"}
    assert known - stages <= {"stage1b", "stage3b"}  # stage 1's words; its own, above


def test_the_padding_of_chapter_9_makes_the_stores_conflict():
    """§9.4 pads against conflicts: with 17 words a row, two of a warp's stores share a bank."""
    banks = [(row * 17 + column) % 32 for row in range(2) for column in range(16)]
    assert len(set(banks)) == 31
    unpadded = [(row * 16 + column) % 32 for row in range(2) for column in range(16)]
    assert len(set(unpadded)) == 32
    values = profile()["stage2"]
    assert 1.9 < values["shared_store_wavefronts"] / values["shared_stores"] < 2.2
    assert values["shared_load_wavefronts"] / values["shared_loads"] < 1.05


def chapter9():
    return {row["variant"]: row for row in report.read_csv(H200 / "chapter9.csv")}


def test_the_padding_costs_stage_2_and_helps_stage_3():
    """Chapter 9, §9.4, settled by ncu and the clock: what docs/ladder.md says of it."""
    found = chapter9()
    stage2, bare2 = found["stage2 as written"], found["stage2 without padding"]
    assert stage2["wavefronts_per_store"] > 1.9 > 1.2 > bare2["wavefronts_per_store"]
    assert stage2["time_ms"] > 1.1 * bare2["time_ms"]
    stage3, bare3 = found["stage3 as written"], found["stage3 without padding"]
    assert bare3["wavefronts_per_load"] > 2 * stage3["wavefronts_per_load"]
    assert bare3["time_ms"] > 1.05 * stage3["time_ms"]


def test_the_unrolling_is_worth_10_to_20_percent_and_the_pragma_nothing():
    found = chapter9()
    written = found["stage2 as written"]["time_ms"]
    assert 1.1 < found["stage2 not unrolled"]["time_ms"] / written < 1.2
    assert found["stage2 without the pragma"]["time_ms"] == pytest.approx(written, rel=0.02)


def test_launch_bounds_change_registers_and_not_the_2x2_tiles_time():
    rows = report.read_csv(H200 / "launch_bounds.csv")
    two = [row for row in rows if row["tile"] == "2x2 of 16x16"]
    assert {row["registers"] for row in two} >= {32, 40, 62, 70}
    assert max(row["occupancy"] for row in two) > 2 * min(row["occupancy"] for row in two)
    times = [row["time_ms"] for row in two]
    assert max(times) < 1.03 * min(times)
    unbound = {row["tile"]: row for row in rows if row["min_blocks"] == "no bounds"}
    assert all(row["spill_bytes"] == 0 for row in unbound.values())
    for row in rows:  # exercise 3: spills, and slower for it
        if row["spill_bytes"] > 500:
            assert row["time_ms"] > 1.3 * unbound[row["tile"]]["time_ms"]


# ---- Chapter 9's exercises -----------------------------------------------------------------------


def peak(what):
    return {row["what"]: row["value"] for row in report.read_csv(H200 / "peaks.csv")}[what]


def test_exercise_1_the_intensity_and_the_ridge():
    assert roofline.perfect_intensity(SIZE, SIZE, SIZE) == pytest.approx(SIZE / 6)
    assert round(SIZE / 6) == 683
    assert round(peak("ffma") / peak("memory")) == 16


def test_exercise_2_is_a_quarter_of_the_tile_and_not_the_tile():
    T = 16
    loaded, read, flop = 2 * T * T * 4, 2 * T * T * T * 4, 2 * T**3
    assert flop / loaded == T / 4 == roofline.analytic_intensity("stage2")
    assert flop / read == 0.25
    values = profile()["stage2"]
    counted = 2 * SIZE**3 / (roofline.SECTOR_BYTES * values["global_load_sectors"])
    assert counted == pytest.approx(T / 4, rel=0.01)


def test_exercise_3_the_bound_is_64_registers():
    assert 65536 // (256 * 4) == 64
    assert profile()["stage3"]["registers"] <= 64


def test_exercise_4_thread_3_1_loads_sb_3_7():
    """The rows and columns that stage 3's own loop copies, for every thread."""
    source = report.stage_file("stage3").read_text()
    assert "thread_row = threadIdx.y * TM, thread_col = threadIdx.x * TN" in source
    assert "tile_row = thread_row + i, tile_col = thread_col + j" in source
    loaders = [
        (tx, ty, r, c)
        for tx, ty, r, c in itertools.product(range(8), range(8), range(2), range(2))
        if (ty * 2 + r, tx * 2 + c) == (3, 7)
    ]
    assert loaders == [(3, 1, 1, 1)]


# ---- the pictures' data --------------------------------------------------------------------------


def test_analytic_intensities_are_those_of_the_texts():
    found = {stage: roofline.analytic_intensity(stage) for stage in profile() if stage != "cublas"}
    assert found["stage0"] == found["stage1"] == found["stage1b"] == 0.25
    assert found["stage2"] == found["stage3"] == 4
    assert found["stage2b"] == 8


def test_no_kernel_is_above_a_roof():
    peaks = {row["what"]: row["value"] for row in report.read_csv(H200 / "peaks.csv")}
    for point in report.read_csv(H200 / "roofline.csv"):
        level, _ = roofline.LEVELS[point["level"]]
        roof = min(peaks["ffma"], point["flop_per_byte"] * peaks[level])
        assert point["tflops"] < 1.02 * roof, point


def test_roofline_csv_is_made_of_the_other_files():
    written = report.read_csv(H200 / "roofline.csv")
    for old, new in zip(written, roofline.rows(H200), strict=True):
        for key, value in new.items():
            assert old[key] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-3))


NCU = """before
"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","1","void stage2::kernel<0>(In<T1>, Out<T1>)","x","launch__registers_per_thread","r","32"
"0","1","void stage2::kernel<0>(In<T1>, Out<T1>)","x","dram__bytes.sum","byte","1,500"
"1","1","sm80_xmma_gemm_f32","x","dram__bytes.sum","byte","2,000"
"2","1","splitk_gemm_reduce","x","dram__bytes.sum","byte","24"
"""


def test_ncus_output_becomes_rows():
    rows = counters.rows_of(counters.parse(NCU), 128)
    table = counters.by_kernel(rows, 128)
    assert table == {
        "stage2": {"registers": 32, "dram_bytes": 1500},
        "cublas": {"dram_bytes": 2024},
    }
    assert {"kernel", "M", "N", "K", "metric", "unit", "value"} == set(rows[0])
    assert counters.by_kernel(rows, 64) == {}
