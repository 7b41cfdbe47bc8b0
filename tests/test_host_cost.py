"""host_cost.py: what is called and timed, and the table that is made of it."""

import json
import re

import host_cost
import pytest
import report
import torch

import torch_sgemm

MODES = ["no gradient", "with gradient, forward", "forward and backward"]


@pytest.fixture
def quick(monkeypatch):
    """Few calls, by which nothing is measured."""
    monkeypatch.setattr(host_cost, "CALLS", 2)
    monkeypatch.setattr(host_cost, "ROUNDS", 2)


@pytest.mark.parametrize("op", host_cost.OPS)
def test_ours_and_torchs_are_called_alike(op):
    """Each in every mode, with the same kind of result."""
    ours, theirs = host_cost.OPS[op]
    assert ours is getattr(torch_sgemm, op)
    calls = [host_cost.modes(contender, "cpu") for contender in (ours, theirs)]
    assert [list(modes) for modes in calls] == [MODES, MODES]
    for mode in MODES:
        results = [modes[mode]() for modes in calls]
        if mode == "forward and backward":
            assert all(len(gradients) == 2 for gradients in results)
        else:
            assert {r.requires_grad for r in results} == {mode != "no gradient"}
            assert {r.shape for r in results} == {(host_cost.SIZE, host_cost.SIZE)}


def test_a_time_is_that_of_one_call(monkeypatch):
    called, clock = [], iter([10.0, 16.0])
    monkeypatch.setattr(host_cost, "CALLS", 3)
    monkeypatch.setattr(host_cost.time, "perf_counter", lambda: next(clock))
    assert host_cost.seconds(lambda: called.append(1), "cpu") == 2.0
    assert len(called) == 3


def test_a_figure_is_the_least_of_rounds_in_which_both_take_turns(monkeypatch):
    """Of a graph's replay it is one call's share."""
    turns = []
    times = {"ours": [4e-6, 3e-6, 9e-6], "torch": [2e-6, 2e-6, 8e-6]}

    def modes(op, device):
        return {mode: (lambda: None, op, mode) for mode in ("no gradient", "graph")}

    def seconds(call, device):
        _, op, _ = call
        turns.append(op)
        return times[op][(len(turns) - 1) // 2 % 3]

    monkeypatch.setattr(host_cost, "OPS", {"mm": ("ours", "torch")})
    monkeypatch.setattr(host_cost, "ROUNDS", 3)
    monkeypatch.setattr(host_cost, "modes", modes)
    monkeypatch.setattr(host_cost, "seconds", seconds)
    plain, graph = host_cost.measure("cpu")
    assert turns == ["ours", "torch"] * 6
    assert tuple(plain) == host_cost.COLUMNS
    assert tuple(plain.values()) == ("mm", "no gradient", *map(pytest.approx, (3, 2, 1.5, 1)))
    share = 1 / host_cost.IN_GRAPH
    figures = (3 * share, 2 * share, 1.5, share)
    assert tuple(graph.values()) == ("mm", "graph", *map(pytest.approx, figures))


def test_the_table_is_that_of_the_file(tmp_path):
    values = ("linear", "no gradient", 11.173, 14.398, 0.776, -3.2251)
    row = dict(zip(host_cost.COLUMNS, values, strict=True))
    env = report.environment("cpu")
    report.write_csv(tmp_path / "host_cost.csv", [row])
    table = host_cost.markdown(report.read_csv(tmp_path / "host_cost.csv"), env)
    assert table == host_cost.markdown([row], env)
    lines = table.splitlines()
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")
    assert lines[2] == "| linear | no gradient | 11.2 | 14.4 | 0.776 | -3.23 |"
    assert lines[-1] == f"64 x 64. {report.describe(env)}."


def test_a_run_prints_and_saves_only_where_it_is_asked(quick, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert host_cost.main(["--device", "cpu"]) == 0
    assert not list(tmp_path.iterdir())
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[:2] for line in printed if re.match(r"\| (mm|linear)", line)] == [
        [f"| {op}", mode] for op in host_cost.OPS for mode in MODES
    ]
    assert host_cost.main(["--device", "cpu", "--save"]) == 0
    rows = report.read_csv(tmp_path / "cpu" / "host_cost.csv")
    assert [(row["op"], row["mode"]) for row in rows] == [
        (op, mode) for op in host_cost.OPS for mode in MODES
    ]
    for row in rows:
        assert row["ours_us"] > 0
        assert row["ratio"] == pytest.approx(row["ours_us"] / row["torch_us"], rel=1e-3)
    env = json.loads((tmp_path / "cpu" / "env.json").read_text())
    assert env["host_cost.csv"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["64"], "unrecognized arguments: 64"),
        (["--device", "cuda"], "torch sees no GPU here"),
    ],
)
def test_wrong_arguments_say_what_is_wrong(monkeypatch, capsys, arguments, text):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(host_cost, "measure", lambda device: pytest.fail("it was measured"))
    with pytest.raises(SystemExit) as stop:
        host_cost.main(arguments)
    assert stop.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "path", sorted(report.RESULTS.glob("*/host_cost.csv")), ids=lambda path: path.parent.name
)
def test_the_results_have_every_op_and_mode(path):
    modes = MODES if path.parent.name == "cpu" else [*MODES, "graph"]
    rows = report.read_csv(path)
    assert tuple(rows[0]) == host_cost.COLUMNS
    assert [(row["op"], row["mode"]) for row in rows] == [
        (op, mode) for op in host_cost.OPS for mode in modes
    ]


@pytest.mark.gpu
def test_a_graph_costs_less_than_its_calls_on_the_gpu(quick):
    """A replay is waited for; calls are not."""
    rows = {(row["op"], row["mode"]): row for row in host_cost.measure("cuda")}
    assert set(rows) == {(op, mode) for op in host_cost.OPS for mode in [*MODES, "graph"]}
    for op in host_cost.OPS:
        for who in ("ours_us", "torch_us"):
            assert 0.5 < rows[op, "graph"][who] < rows[op, "forward and backward"][who]
