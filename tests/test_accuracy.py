"""The accuracy suite: its data are what their names say, and no wrong kernel gets past them."""

import math
import re
from types import SimpleNamespace

import accuracy
import accuracy_cases
import check
import pytest
import report
import suite
import torch

import torch_sgemm

FLT_MIN = torch.finfo(torch.float32).tiny
SMALL = 64
CASES = {case.name: case for case in accuracy_cases.cases(SMALL)}
each_case = pytest.mark.parametrize("name", CASES)


def inputs(name):
    return CASES[name].inputs("cpu")


def measured(name, precisions=("ieee",)):
    """The case's rows by contender, and what was complained of."""
    failures = check.Failures()
    rows = accuracy.measure(CASES[name], "cpu", precisions, failures)
    return {row["precision"]: row for row in rows}, failures.texts


# ---- the rule ------------------------------------------------------------------------------------


@each_case
def test_product_ops_and_stages_are_right_on_all_data(name):
    rows, complaints = measured(name, ("ieee", "auto"))
    assert complaints == []
    assert list(rows) == ["stage0", "stage10", "ieee", "auto"]
    for row in rows.values():
        assert tuple(row) == accuracy.COLUMNS
        assert row["ok"] == 1
        assert 0 <= row["rms"] < 1
        assert 0 <= row["cw"] < 1
    assert CASES[name].exact <= (rows["ieee"]["cw"] == 0)


def tf32(a, b):
    """TF32 keeps 10 bits of a fraction."""

    def shorten(t):
        return (t.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)

    return shorten(a) @ shorten(b)


def flushes_subnormal_inputs(a, b):
    return a.where(a.abs() >= FLT_MIN, 0.0) @ b


def flushes_subnormal_results(a, b):
    c = a @ b
    return c.where(~(c.abs() < FLT_MIN), 0.0)


def saturates(a, b):
    return (a @ b).clamp(-check.FLT_MAX, check.FLT_MAX)


def one_dropped_product(a, b):
    return a[:, 1:] @ b[1:] if a.shape[1] > 1 else torch.zeros(len(a), b.shape[1])


def inf_times_zero_is_zero(a, b):
    return (a @ b).nan_to_num(0.0, math.inf, -math.inf)


def inf_is_nan(a, b):
    c = a @ b
    return c.where(c.isfinite(), math.nan)


def all_nan(a, b):
    return (a @ b) * math.nan


def halves_of_fp16(a, b):
    """One scale for a whole matrix, and two FP16 pieces of each number."""

    def pieces(t):
        t = t * 2.0 ** (14 - math.floor(math.log2(t.abs().max())))
        high = t.half().float()
        return high.double() + (t - high).half().double(), t

    (a16, a_scaled), (b16, b_scaled) = pieces(a), pieces(b)
    back = (a.double().norm() / a_scaled.double().norm()) * (
        b.double().norm() / b_scaled.double().norm()
    )
    return (a16 @ b16 * back).float()


def pairs_of_bf16(a, b):
    """Three products of two BF16 pieces: 16 bits."""

    def pieces(t):
        high = t.bfloat16().float()
        return high, (t - high).bfloat16().float()

    (a1, a2), (b1, b2) = pieces(a), pieces(b)
    return a1 @ b1 + (a1 @ b2 + a2 @ b1)


@pytest.mark.parametrize(
    ("broken", "caught"),
    [
        (all_nan, {"randn", "-1, 0, 1, and 11-bit integers", "randn, K = 1", "near FLT_MAX"}),
        (tf32, {"randn", "phi = 4", "softmax probabilities", "gradients", "randn, K = 65536"}),
        (pairs_of_bf16, {"randn", "phi = 0", "LayerNorm outputs", "11-bit integers"}),
        (
            halves_of_fp16,
            {
                "rows of A, columns of B by 2^U[-60, 60]",
                "columns of A by 2^U[-120, 120], rows of B back",
                "graded rows of A, columns of B",
            },
        ),
        (one_dropped_product, {"randn", "few huge entries", "randn, K = 1", "randn, K = 65536"}),
        (flushes_subnormal_inputs, {"subnormal inputs"}),
        (flushes_subnormal_results, {"subnormal results"}),
        (saturates, {"near FLT_MAX, all positive", "Inf in A", "Inf in B", "Inf in A and B"}),
        (inf_times_zero_is_zero, {"Inf in A, zeros in B", "NaN in A", "NaN in B"}),
        (inf_is_nan, {"Inf in A", "Inf in B"}),
    ],
)
def test_a_wrong_kernel_is_caught_by_the_data_meant_for_it(monkeypatch, broken, caught):
    monkeypatch.setattr(torch_sgemm, "mm", lambda a, b, *, precision, out: out.copy_(broken(a, b)))
    for name in caught:
        rows, complaints = measured(name)
        assert rows["ieee"]["ok"] == 0, name
        assert rows["stage0"]["ok"] == rows["stage10"]["ok"] == 1
        (text,) = complaints
        # Where K is large the bound is loose, and the rms tells.
        how = r"\d+ of \d+ entries are wrong: C\[|an rms error of .* is over"
        assert re.match(rf"{re.escape(name)}, ieee: ({how})", text)


def test_a_kernel_that_writes_nothing_is_wrong(monkeypatch):
    monkeypatch.setattr(torch_sgemm, "mm", lambda a, b, *, precision, out: out)
    rows, _ = measured("randn")
    assert rows["ieee"]["ok"] == 0


def test_a_kernel_that_is_only_worse_than_stage0_is_caught_by_its_rms(monkeypatch):
    """Within the bound of FP32 sums, and 1.5 times what stage0 is off by."""

    def worse(a, b, *, precision, out):
        exact = a.double() @ b.double()
        return out.copy_(exact + factor * (torch_sgemm.STAGES["stage0"](a, b) - exact))

    monkeypatch.setattr(torch_sgemm, "mm", worse)
    factor = 1.5
    rows, complaints = measured("randn")
    assert rows["ieee"]["ok"] == 0
    assert re.match(r"randn, ieee: an rms error of .* is over 1\.3\d times stage0's", complaints[0])
    assert measured("randn", ("auto",))[1] == []  # below 2^-22, which auto may have
    factor = 1.2
    assert measured("randn")[1] == []


def test_integers_are_exact_or_wrong(monkeypatch):
    def off(a, b, *, precision, out):
        torch.mm(a, b, out=out)
        out[3, 3] += 2.0**-9 * out[3, 3].abs().clamp(min=1)
        return out

    monkeypatch.setattr(torch_sgemm, "mm", off)
    for name in (name for name, case in CASES.items() if case.exact):
        rows, _ = measured(name)
        assert rows["ieee"]["ok"] == 0
    errors = {"ieee": check.Errors(0.0, 1e-9, 0, ""), "stage0": check.Errors(0.0, 0.0, 0, "")}
    case = CASES["7-bit integers"]
    assert accuracy.complaint(case, "ieee", errors, 1.0) == "integers are not exact: cw is 1e-09"


def test_an_rms_over_few_entries_is_forgiven_some_luck():
    case = CASES["randn"]
    errors = {"ieee": check.Errors(1.9, 0.0, 0, ""), "stage0": check.Errors(1.0, 0.0, 0, "")}
    assert "is over 1.29 times" in accuracy.complaint(case, "ieee", errors, 1e4)
    assert accuracy.complaint(case, "ieee", errors, 9.0) == ""
    errors["ieee"] = check.Errors(math.nan, 0.0, 0, "")
    assert "nan is over" in accuracy.complaint(case, "ieee", errors, 1.0)


def test_the_entries_that_carry_an_rms_are_counted():
    def entries(exact):
        return accuracy.carried_by(SimpleNamespace(exact=torch.tensor(exact, dtype=torch.float64)))

    assert entries([3.0, -3.0, 3.0, 3.0]) == pytest.approx(4)
    assert entries([2.0**100, 1.0, 1.0]) == pytest.approx(1)
    assert entries([1.0, 1.0, math.inf, math.nan, 1e39]) == pytest.approx(2)
    assert entries([0.0, 0.0]) == entries([math.nan]) == 1


# ---- the rule where sums overflow ----------------------------------------------------------------


def errors(result, a, b):
    a, b = torch.tensor([a]), torch.tensor([b]).T
    return check.errors(torch.tensor([[result]]), check.reference(a, b))


def test_just_at_flt_max_a_sum_may_go_either_way_and_no_other():
    top = check.FLT_MAX
    almost = [top * (1 - 2.0**-23), 0.0]
    for result in (top * (1 - 2.0**-23), top, math.inf):
        assert errors(result, almost, [1.0, 1.0]).wrong == 0
    for result in (0.99 * top, -top):
        assert errors(result, almost, [1.0, 1.0]).wrong == 1
    over = [top, top * 2.0**-24]  # rounds to Inf; a sum from the other end may stay below
    assert errors(math.inf, over, [1.0, 1.0]).wrong == errors(top, over, [1.0, 1.0]).wrong == 0
    far = [top, top]
    assert errors(math.inf, far, [1.0, 1.0]).wrong == 0
    assert errors(top, far, [1.0, 1.0]).wrong == 1  # saturated
    assert errors(math.inf, [0.9 * top, 0.0], [1.0, 1.0]).wrong == 1  # far below


def test_what_may_overflow_is_not_measured():
    top = check.FLT_MAX
    found = errors(math.inf, [top, -top / 2], [1.0, 1.0])
    assert (found.wrong, found.rms, found.cw) == (0, 0.0, 0.0)
    assert errors(0.6 * top, [top, -top / 2], [1.0, 1.0]).wrong == 1


def test_a_wider_component_wise_error_is_for_those_who_promise_it():
    a, b = torch.randn(20, 8), torch.randn(8, 30)
    ref = check.reference(a, b)
    result = (ref.exact + 2.0**-22 * ref.scale).float()
    assert check.errors(result, ref, cw=2.0**-21).wrong == 0
    result = (ref.exact + 2.0**-20 * ref.scale).float()
    assert check.errors(result, ref, cw=2.0**-21).wrong == 600
    assert check.errors(result, ref).wrong == 600


# ---- the data ------------------------------------------------------------------------------------


@each_case
def test_a_case_is_the_same_every_time_and_like_no_other(name):
    case = CASES[name]
    a, b = case.inputs("cpu")
    assert a.shape == (case.M, case.K)
    assert b.shape == (case.K, case.N)
    assert a.dtype == b.dtype == torch.float32
    torch.manual_seed(1)
    for first, second in zip((a, b), case.inputs("cpu"), strict=True):
        assert torch.equal(
            first.view(torch.int32) if first.is_contiguous() else first,
            (second.view(torch.int32) if second.is_contiguous() else second),
        )
    others = (other for other in CASES.values() if other.K == case.K and other.name != name)
    assert not any(torch.equal(a, other.inputs("cpu")[0]) for other in others)


def test_there_are_all_kinds_of_data():
    assert len(CASES) == len(accuracy_cases.cases(SMALL)) == 50
    full = accuracy_cases.cases(accuracy.DEFAULT_SIZE["cuda"])
    assert [case.name for case in full] == list(CASES)
    depths = {case.K: case.M for case in full if case.name.startswith("randn, K")}
    assert depths == {**dict.fromkeys(accuracy_cases.DEPTHS, 2048), 65536: 512}
    assert min(depths) == 1


def test_integers_stay_below_2_to_the_24_at_full_size():
    for case in accuracy_cases.cases(accuracy.DEFAULT_SIZE["cuda"]):
        if case.exact:
            a, b = CASES[case.name].inputs("cpu")
            assert a.abs().max() * b.abs().max() * case.K < 2**24
            assert torch.equal(a, a.round())
            assert a.abs().max() <= 2047 >= b.abs().max()


def test_the_ends_of_the_range_are_reached():
    a, _ = inputs("subnormal inputs")
    assert 0 < a.abs().max() < FLT_MIN
    a, b = inputs("subnormal results")
    assert a.abs().min() > FLT_MIN < b.abs().min()
    assert ((a @ b).abs() < FLT_MIN).all()
    for name, overflows in (("near FLT_MAX", 0.0), ("near FLT_MAX, all positive", 0.5)):
        a, b = inputs(name)
        over = (a.double().abs() @ b.double().abs() > check.FLT_MAX).float().mean()
        assert 0.2 < over < 0.8
        assert (a @ b).isinf().float().mean().item() == pytest.approx(overflows, abs=0.3)
        assert a.isfinite().all()
        assert b.isfinite().all()
    a, b = inputs("products over FLT_MAX")
    assert not (a @ b).isfinite().any()
    assert check.reference(a, b).exact.isfinite().all()


@pytest.mark.parametrize("value", ["Inf", "NaN"])
@pytest.mark.parametrize(("where", "in_a", "in_b"), [("A", 1, 0), ("B", 0, 1), ("A and B", 1, 1)])
def test_what_is_not_finite_is_where_it_is_said_to_be(value, where, in_a, in_b):
    test = torch.isinf if value == "Inf" else torch.isnan
    for t, there in zip(inputs(f"{value} in {where}"), (in_a, in_b), strict=True):
        assert 6 * there <= test(t).sum() <= 8 * there
        assert (test(t) | t.isfinite()).all()
        if there and value == "Inf":
            assert t.max() == -t.min() == math.inf


def test_scales_cancel_or_do_not_as_their_names_say():
    a, b = inputs("columns of A by 2^U[-120, 120], rows of B back")
    assert a.abs().max() / a.abs()[a != 0].min() > 2.0**127 > 1e5 > (a @ b).abs().max()
    a, b = inputs("rows of A, columns of B by 2^U[-60, 60]")
    assert a.abs().amax(1).max() > 2.0**50
    assert a.abs().amax(1).min() < 2.0**-50
    assert b.abs().amax(0).min() < 2.0**-50
    a, b = inputs("cancelling sums")
    ref = check.reference(a, b)
    assert (ref.exact.abs() / ref.scale).mean() < 2.0**-13
    a, _ = inputs("few huge entries")
    assert 0 < (a.abs() > 1e4).float().mean() < 0.1
    a, _ = inputs("softmax probabilities")
    torch.testing.assert_close(a.sum(1), torch.ones(SMALL))
    _, b = inputs("weights rounded to BF16")
    assert torch.equal(b, b.bfloat16().float())


# ---- the command ---------------------------------------------------------------------------------


def test_the_table_is_printed_and_the_file_written(tmp_path, capsys):
    path = tmp_path / "new" / "accuracy.csv"
    arguments = ["--device", "cpu", "--size", "16", "--precision", "ieee,auto"]
    assert accuracy.main([*arguments, "--case", "randn$|NaN in A$", "--csv", str(path)]) == 0
    rows = report.read_csv(path)
    assert tuple(rows[0]) == accuracy.COLUMNS
    assert [(r["case"], r["precision"]) for r in rows] == [
        (case, p) for case in ("randn", "NaN in A") for p in ("stage0", "stage10", "ieee", "auto")
    ]
    assert all(r["M"] == r["N"] == r["K"] == 16 and r["ok"] == 1 for r in rows)
    assert 0 < rows[0]["torch_rms"] < 1e-6
    captured = capsys.readouterr()
    heading = next(line for line in captured.out.splitlines() if line.startswith("  rms error"))
    assert " ".join(heading.split()) == "rms error, cw error K ieee auto stage0 stage10 torch"
    assert "%|" not in captured.out
    assert "2/2" in captured.err or "0/2" in captured.err


def test_a_broken_rule_is_told_and_loses_no_other_row(monkeypatch, tmp_path, capsys):
    def mm(a, b, *, precision, out=None):
        if a.isnan().any():
            raise RuntimeError("no NaN, please\nand its trace")
        return torch.mm(a, b, out=out) if len(a) == 256 or (a < 0).any() else out.zero_()

    monkeypatch.setattr(torch_sgemm, "mm", mm)
    path = tmp_path / "accuracy.csv"
    arguments = ["--device", "cpu", "--size", "16", "--csv", str(path)]
    assert accuracy.main([*arguments, "--case", r"randn$|U\[0|NaN in A$"]) == 1
    rows = {(r["case"], r["precision"]): r["ok"] for r in report.read_csv(path)}
    assert rows["randn", "ieee"] == rows["NaN in A", "stage0"] == 1
    assert rows["U[0, 1)", "ieee"] == 0
    assert ("NaN in A", "ieee") not in rows
    captured = capsys.readouterr()
    said = captured.err.strip().splitlines()[-2:]
    assert said[0].startswith(
        "accuracy.py: U[0, 1), ieee: 256 of 256 entries are wrong: C[0, 0] is"
    )
    assert said[1] == "accuracy.py: NaN in A, ieee: RuntimeError: no NaN, please"
    assert re.search(r"U\[0, 1\) .* \*  ", captured.out)
    assert re.search(r"NaN in A .* failed  ", captured.out)


def test_torch_and_tf32_stand_there_for_scale(monkeypatch):
    real = accuracy.contenders

    def contenders(device, precisions):
        rows = {"TF32": lambda a, b, out: out.copy_(tf32(a, b))}
        return (
            {"torch": lambda a, b, out: out.zero_()}
            | rows
            | real(device, precisions)
            | {"torch": lambda a, b, out: out.zero_()}
        )

    monkeypatch.setattr(accuracy, "contenders", contenders)
    rows, complaints = measured("randn")
    assert complaints == []
    assert rows["TF32"]["ok"] == 0
    assert 1e-4 < rows["TF32"]["rms"] < 1e-2
    assert rows["ieee"]["torch_rms"] == 1


def test_the_documents_table_is_made_of_the_file(tmp_path):
    rows = [
        dict(zip(accuracy.COLUMNS, ("randn", 2048, 2048, 64, p, r, c, 3e-7, 1e-7, ok), strict=True))
        for p, r, c, ok in (
            ("TF32", 3e-4, 1e-5, 0),
            ("stage0", 4e-7, 2e-7, 1),
            ("ieee", 3e-7, 1e-7, 1),
        )
    ]
    report.write_csv(tmp_path / "accuracy.csv", rows)
    env = report.environment("cpu")
    assert accuracy.markdown(report.read_csv(tmp_path / "accuracy.csv"), env).splitlines() == [
        "| rms error, cw error | K | ieee | stage0 | TF32 | torch |",
        "|---|--:|--:|--:|--:|--:|",
        "| randn | 64 | 3.0e-07, 1.0e-07 | 4.0e-07, 2.0e-07 | 3.0e-04, 1.0e-05 * "
        "| 3.0e-07, 1.0e-07 |",
        "",
        "Against float64, M = N = 2048 (less at the largest K). An asterisk: breaks the rule of "
        f"FP32. {report.describe(env)}.",
    ]


@pytest.mark.parametrize("broken", [False, True])
def test_results_are_saved_where_the_rule_holds(monkeypatch, tmp_path, capsys, broken):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    few = [CASES["randn"], CASES["7-bit integers"]]
    monkeypatch.setattr(accuracy_cases, "cases", lambda size: few)
    if broken:
        monkeypatch.setattr(suite, "require_fp32", lambda *args: None)
        monkeypatch.setattr(torch_sgemm, "mm", lambda a, b, *, precision, out: out.zero_())
    assert accuracy.main(["--device", "cpu", "--save"]) == int(broken)
    path = tmp_path / "cpu" / "accuracy.csv"
    assert path.exists() == (not broken)
    assert ("--save wrote nothing" in capsys.readouterr().err) == broken
    if not broken:
        assert len(report.read_csv(path)) == 6
        assert report.read_environment(path.parent, "accuracy.csv")["torch"] == torch.__version__


def test_a_tf32_baseline_fails_the_run(monkeypatch, capsys):
    monkeypatch.setattr(suite, "contenders", lambda op, precisions: {suite.REFERENCE: tf32})
    assert accuracy.main(["--device", "cpu", "--size", "16", "--case", "randn$"]) == 1
    assert "before the run: torch.mm does not multiply in FP32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--precision", "tf32"], r"--precision: there is no 'tf32'; there are ieee, auto"),
        (["--case", "["], r"--case: '\[' is no regular expression"),
        (["--case", "nothing"], r"--case: no case has 'nothing' in its name"),
        (["--size", "8"], r"--size must be at least 16, got 8"),
        (["--size", "0"], r"--size must be at least 16, got 0"),
        (["--save", "--size", "64"], r"--save writes the whole suite: leave out --case and --size"),
        (["randn"], r"unrecognized arguments: randn"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(capsys, arguments, text):
    with pytest.raises(SystemExit) as exit:
        accuracy.parse(["--device", "cpu", *arguments])
    assert exit.value.code == 2
    assert re.search(text, capsys.readouterr().err.strip().split("\n")[-1])


@pytest.mark.gpu
def test_the_rule_holds_at_full_size_on_the_gpu(tmp_path):
    path = tmp_path / "accuracy.csv"
    assert accuracy.main(["--precision", "ieee,auto", "--csv", str(path)]) == 0
    rows = report.read_csv(path)
    assert {r["precision"] for r in rows} == {"TF32", "stage0", "stage10", "ieee", "auto"}
    assert any(not r["ok"] for r in rows if r["precision"] == "TF32")  # it runs, and is no FP32
