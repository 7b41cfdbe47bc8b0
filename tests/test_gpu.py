"""What only a GPU can show: streams, graphs, devices, launches, kernels, memory. Ids like B63 are
rows of the bug list: faults of this kind that users of other packages reported."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import check
import pytest
import torch
from adapters import PRODUCTS, products_too
from arena import LAYOUTS, Arena, integers, place, require_right, require_untouched
from gpu_work import allocations, device_work, is_ours, randn, two_gpus

import torch_sgemm
from torch_sgemm import STAGES, cublas

pytestmark = pytest.mark.gpu

two_stages = pytest.mark.parametrize("stage", ["stage0", "stage3"], indirect=True)
LADDER = {**STAGES, "cublas": cublas}
OPS = {**LADDER, **PRODUCTS}
ladder_op = pytest.mark.parametrize("op", LADDER.values(), ids=LADDER)
every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
SLEEP = 20_000_000  # clock cycles: about 10 ms


def python(script: str) -> None:
    """Runs a script in a process of its own, where nothing has touched CUDA yet."""
    root = str(Path(torch_sgemm.__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", f"if True:\n{script}"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ---- streams -------------------------------------------------------------------------------------


@every_op
def test_work_goes_to_the_current_stream(op):
    """B63, B65: on another stream than the inputs' it reads them too early, now and then."""
    a, b, c = (torch.zeros(64, 64, device="cuda") for _ in range(3))
    out = torch.empty_like(a)
    wrong = torch.zeros((), dtype=torch.long, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(1, 51):
            torch.cuda._sleep(SLEEP // 20)
            a.fill_(i)
            b.fill_(1.0)
            c.fill_(-i)
            wrong += (op(a, b, c, beta=2.0) != 62 * i).sum()
            op(a, b, c, beta=2.0, out=out)
            wrong += (out != 62 * i).sum()
            out.fill_(float("nan"))
    stream.synchronize()
    assert wrong.item() == 0


@every_op
def test_nothing_waits_for_the_gpu(op):
    """The call returns while the GPU is still at the work before it."""
    a, c = randn(64, 64), randn(64)
    out = torch.empty_like(a)
    op(a.t(), a, c, beta=1.0, out=out)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(50 * SLEEP)
        op(a, a)
        op(a.t(), a, c, beta=1.0, out=out)
        returned_early = not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert returned_early
    torch.cuda.synchronize()


@products_too
def test_backward_runs_on_the_stream_of_forward(stage):
    """B63: autograd works on threads of its own, whose current stream is another."""
    w = randn(64, 64).requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(1, 21):
            torch.cuda._sleep(SLEEP // 10)
            x = torch.full((64, 64), float(i), device="cuda")
            w.grad = None
            stage(x, w).sum().backward()
            assert (w.grad == 64 * i).all()


@every_op
def test_two_threads_at_once(op):
    """B62: state that threads share is set up by one of them, under the other's feet."""

    def work(seed):
        generator = torch.Generator("cuda").manual_seed(seed)
        a = torch.randn(130, 70, device="cuda", generator=generator)
        b = torch.randn(70, 90, device="cuda", generator=generator)
        expected = check.reference(a, b)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            for _ in range(100):
                result = op(a, b)
            check.require(result, expected)
            torch.cuda.current_stream().synchronize()

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(work, seed) for seed in range(8)]:
            future.result()


# ---- CUDA graphs ---------------------------------------------------------------------------------


@every_op
def test_a_graph_follows_new_inputs(op):
    """B66: kernels that are not on the captured stream vanish from the graph."""
    a, b, c, out = randn(130, 70), randn(70, 90), randn(90), torch.empty(130, 90, device="cuda")
    op(a, b, c, beta=1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        new = op(a, b, c, alpha=0.5, beta=2.0)
        turned = op(b.t(), a.t())  # copies of a and b are part of the graph
        op(a, b, c, beta=1.0, out=out)
    for _ in range(5):
        for tensor in (a, b, c):
            tensor.normal_()
        out.fill_(float("nan"))
        graph.replay()
        check.require(new, check.reference(a, b, c, 0.5, 2.0))
        check.require(turned, check.reference(b.t(), a.t()))
        check.require(out, check.reference(a, b, c, 1.0, 1.0))
        bits = new.clone()
        graph.replay()
        assert torch.equal(new, bits)


@pytest.mark.parametrize("name", [*STAGES, "mm", "linear"])
def test_the_first_call_may_be_captured(name):
    """B68: what a first call sets up lands in the graph's memory, or cannot be captured; workspace
    for parts of K, which the product ops have here."""
    K = 7000 if name in PRODUCTS else 70
    python(f"""
    import torch, torch_sgemm
    products = dict(mm=torch_sgemm.mm, linear=lambda a, b: torch_sgemm.linear(a, b.t()))
    op = dict(torch_sgemm.STAGES, **products)["{name}"]
    a, b = torch.ones(130, {K}, device="cuda"), torch.ones({K}, 90, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op(a, b)
    for value in range(1, 6):
        a.fill_(value)
        graph.replay()
        assert (op(b.t(), a.t()) == {K} * value).all(), "the eager call"
        assert (result == {K} * value).all(), "the graph's"
    """)


@products_too
def test_a_graph_of_a_training_step(stage):
    """B66: forward, backward and update in one graph."""
    x, w = randn(32, 16), randn(16, 8).requires_grad_()
    twin = w.detach().clone().requires_grad_()

    def step(op, w):
        w.grad = None
        op(x, w).square().mean().backward()
        with torch.no_grad():
            w.sub_(w.grad, alpha=0.1)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(stage, w)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(stage, w)
    with torch.no_grad():
        w.copy_(twin)
    for _ in range(5):
        x.normal_()
        graph.replay()
        step(stage, twin)
        torch.testing.assert_close(w, twin)


# ---- devices -------------------------------------------------------------------------------------


@two_gpus
@every_op
def test_tensors_on_another_device_than_the_current(op):
    """B60: zeros or an illegal access without a device guard."""
    assert torch.cuda.current_device() == 0
    a, b, c = (randn(*s, device="cuda:1") for s in ((33, 40), (40, 21), (21,)))
    out = Arena(33, 21, device="cuda:1")
    assert require_right(op, a, b, c, beta=1.0).device == torch.device("cuda:1")
    require_right(op, a.t().contiguous().t(), b, c, beta=1.0, out=out.view)
    require_untouched(out)
    x, w = a.clone().requires_grad_(), b.clone().requires_grad_()
    op(x, w, alpha=2.0).sum().backward()
    upstream = torch.ones(33, 21, device="cuda:1")
    check.require(x.grad, check.reference(upstream, b.t(), alpha=2.0))
    check.require(w.grad, check.reference(a.t(), upstream, alpha=2.0))
    assert torch.cuda.current_device() == 0


@two_gpus
@every_op
def test_each_device_in_turn_and_from_two_threads(op):
    """B62: what is set up for the first device only fails on the second."""

    def work(device):
        for _ in range(20):
            a, b = randn(65, 33, device=device), randn(33, 70, device=device)
            require_right(op, a, b)

    for device in ("cuda:0", "cuda:1", "cuda:0"):
        work(device)
    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(work, f"cuda:{i % 2}") for i in range(4)]:
            future.result()


def test_fork_after_import():
    """B121: CUDA touched at import, and a DataLoader's workers cannot use it."""
    python("""
    import os, torch, torch_sgemm
    assert not torch.cuda.is_initialized()
    child = os.fork()
    if child == 0:
        try:
            a = torch.ones(40, 40, device="cuda")
            right = all(bool((op(a, a) == 40).all()) for op in torch_sgemm.STAGES.values())
        except BaseException as error:
            print(error, flush=True)
            os._exit(2)
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """)


# ---- kernels and memory --------------------------------------------------------------------------

GEMMS = re.compile(r"gemm|gemv|cutlass|cublas|splitK|dot_kernel", re.IGNORECASE)


def test_the_profiler_sees_what_is_looked_for():
    """Or the tests below could not fail."""
    a, out = randn(64, 64), torch.empty(64, 64, device="cuda")
    assert any(GEMMS.search(name) for name in device_work(lambda: torch.mm(a, a, out=out)))
    assert len(device_work(lambda: out.copy_(a.t()))) == 1
    assert allocations(lambda: torch.mm(a, a)) > 0
    assert allocations(lambda: out.copy_(a)) == 0


@pytest.mark.parametrize("shape", [(64, 64, 64), (65, 33, 17), (1, 40, 7), (64, 64, 0)])
@pytest.mark.parametrize("c_shape", [None, "()", "(N,)", "(M, 1)", "(M, N)"])
def test_one_kernel_and_no_allocation(stage, shape, c_shape):
    """For rows that are adjacent in memory, whatever lies between them, and a given out."""
    M, N, K = shape
    a, b = place(randn(M, K), "padded").view, place(randn(K, N), "column_slice").view
    out = Arena(M, N, "column_slice", "cuda").view
    c = {
        None: lambda: None,
        "()": lambda: randn(),
        "(N,)": lambda: randn(N),
        "(M, 1)": lambda: randn(M, 1),
        "(M, N)": lambda: randn(N, M).t(),
    }[c_shape]()

    def call():
        stage(a, b, c, alpha=0.5, beta=2.0, out=out)

    (name,) = device_work(call)
    assert is_ours(name, stage.__name__), name
    assert allocations(call) == 0
    assert allocations(lambda: stage(a, b, c, beta=2.0)) == 1  # the result


@pytest.mark.parametrize("operand", ["a", "b", "out"])
def test_other_layouts_take_one_copy(stage, operand):
    """A transposed operand is copied once, a transposed out written through one copy."""
    x = {name: randn(40, 40) for name in ("a", "b", "out")}
    x[operand] = x[operand].t()
    names = device_work(lambda: stage(**x))
    assert len(names) == 2, names
    assert sum(is_ours(name, stage.__name__) for name in names) == 1
    assert allocations(lambda: stage(**x)) == 1


@products_too
def test_no_kernel_for_an_empty_result(stage):
    """B18: a grid of 0 blocks is an invalid launch."""
    a = torch.empty(0, 5, device="cuda")
    assert device_work(lambda: stage(a, a.t().new_empty(5, 7))) == []


def test_stages_compute_with_their_own_kernels(stage):
    """Nothing of cuBLAS, forward or backward; copies and sums may be torch's."""
    x, w = randn(96, 64).requires_grad_(), randn(48, 64).requires_grad_()
    bias = randn(48).requires_grad_()

    def step():
        stage(x, w.t(), bias, beta=1.0).sum().backward()

    names = device_work(step)
    products = [name for name in names if is_ours(name, stage.__name__)]
    assert len(products) == 3, names
    others = [name for name in names if name not in products]
    assert not [name for name in others if GEMMS.search(name)], others


# ---- cuBLAS as the reference ---------------------------------------------------------------------


@pytest.mark.parametrize("operand", ["a", "b", "c", "out"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cublas_on_every_layout(operand, layout):
    for M, N, K in ((33, 17, 19), (64, 64, 64), (1, 40, 7), (40, 1, 7), (7, 9, 1), (1, 1, 1)):
        layouts = dict.fromkeys(("a", "b", "c", "out"), "padded") | {operand: layout}
        a, b = place(randn(M, K), layouts["a"]), place(randn(K, N), layouts["b"])
        c, out = place(randn(M, N), layouts["c"]), Arena(M, N, layouts["out"], "cuda")
        require_right(cublas, a.view, b.view)
        require_right(cublas, a.view, b.view, c.view, alpha=-0.5, beta=2.0, out=out.view)
        require_right(cublas, a.view, b.view, out.view, beta=-1.0, out=out.view)
        require_untouched(a, b, c, out)


def test_cublas_on_views_that_blas_has_no_leading_dimension_for():
    x, y = randn(24, 24), randn(12, 12)
    for view in (
        x[0, :12].expand(12, 12),
        x[:12, :1].expand(12, 12),
        x.as_strided((12, 12), (1, 1)),
        x.as_strided((12, 12), (5, 1), 2),
    ):
        require_right(cublas, view, y)
        require_right(cublas, y, view)
        require_right(cublas, y, y, view, alpha=2.0, beta=-1.0)


@pytest.mark.parametrize("c_shape", [(), (1,), (17,), (1, 17), (33, 1), (33, 17)])
def test_cublas_broadcasts_c(c_shape):
    a, b, c = randn(33, 19), randn(19, 17), randn(*c_shape)
    require_right(cublas, a, b, c, beta=1.0)
    require_right(cublas, a, b, c, alpha=0.0, beta=0.5)
    require_right(cublas, a, b, torch.full_like(c, float("nan")), beta=0.0)
    nan = torch.full_like(a, float("nan"))
    require_right(cublas, nan, b, c, alpha=0.0, beta=1.0)


@pytest.mark.parametrize(("M", "N", "K"), [(0, 5, 4), (5, 0, 4), (5, 6, 0), (0, 0, 0)])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_cublas_on_empty_sizes(M, N, K, beta):
    a, b, c = randn(M, K), randn(K, N), randn(M, N)
    require_right(cublas, a, b, c, beta=beta)
    require_right(cublas, a, b)


def test_cublas_is_fp32_and_leaves_torch_as_it_was():
    """B111: an op that flips, or follows, torch's TF32 switch."""
    matmul = torch.backends.cuda.matmul
    eye = torch.eye(256, device="cuda")

    def torch_uses_tf32():
        return not torch.equal(torch.mm(1024.5 * eye, eye), 1024.5 * eye)

    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "ieee"
        assert not torch_uses_tf32()
        check.require_fp32(cublas, "cuda", "cublas")
        assert not torch_uses_tf32()
        matmul.fp32_precision = "tf32"
        assert torch_uses_tf32()
        check.require_fp32(cublas, "cuda", "cublas")
        for stage in STAGES.values():
            check.require_fp32(stage, "cuda", stage.__name__)
        assert torch_uses_tf32()
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


# ---- sizes ---------------------------------------------------------------------------------------


@every_op
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [
        pytest.param(32769, 65536, 16, id="B36-last-row-begins-at-2^31"),
        pytest.param(46341, 46341, 4, id="B37-M*N-over-2^31"),
    ],
)
def test_results_of_more_than_2_to_the_31_elements(op, M, N, K):
    a, b, c = randn(M, K), randn(K, N), randn(N)
    result = op(a, b, c, beta=1.0)
    for rows in (slice(0, 2), slice(M // 2, M // 2 + 2), slice(M - 2, M)):
        check.require(result[rows], check.reference(a[rows], b, c, 1.0, 1.0), f"rows {rows}")
    for cols in (slice(0, 2), slice(N - 2, N)):
        expected = check.reference(a, b[:, cols], c[cols], 1.0, 1.0)
        check.require(result[:, cols], expected, f"columns {cols}")


@every_op
def test_more_than_2_to_the_21_rows(op):
    """B41: rows beyond 2^21 wrong."""
    a = torch.ones(2**21 + 10, 2, device="cuda")
    b = torch.tensor([[1.0, 0.0], [0.01, 1.0]], device="cuda")
    require_right(op, a, b)


@every_op
@pytest.mark.parametrize(("M", "N"), [(1, 3_000_001), (3_000_001, 2)])
def test_long_and_narrow_results(op, M, N):
    require_right(op, integers(M, 2, device="cuda"), integers(2, N, device="cuda"))


# ---- failures ------------------------------------------------------------------------------------


@every_op
def test_out_of_memory_is_one_clear_error(op):
    """B73, B74: a failure that leaves an old result, or an error blamed on a later call."""
    rows = 300_000
    one = torch.ones(1, 1, device="cuda")
    with pytest.raises(RuntimeError) as caught:
        op(one.expand(rows, 1), one.expand(1, rows))
    assert re.match(
        r"could not allocate the \((1, )?300000, 300000\) result, 335.3 GiB, on cuda:0",
        str(caught.value),
    )
    assert torch.equal(one + one, 2 * one)
    torch.cuda.synchronize()
    assert torch.equal(op(one, one), one)


def test_a_launch_that_fails_is_an_error_at_the_call():
    """B73: nobody looks whether the kernel began, and what out held is taken for the result."""
    python("""
    import os, torch, torch_sgemm
    a, out = torch.ones(64, 64, device="cuda"), torch.empty(64, 64, device="cuda")
    ops = dict(torch_sgemm.STAGES, mm=torch_sgemm.mm)
    for op in ops.values():
        op(a, a, out=out)
    try:
        a[torch.tensor([99], device="cuda")]  # after a failed assertion no launch succeeds
        torch.cuda.synchronize()
    except RuntimeError:
        pass
    for name, op in ops.items():
        try:
            op(a, a, out=out)
        except RuntimeError as error:
            assert "launch failed: device-side assert" in str(error), error
        else:
            raise AssertionError(name + " returned")
    os._exit(0)  # without the destructors, which may want the device
    """)


@ladder_op
def test_a_copy_that_finds_no_memory_is_one_clear_error(op):
    """B74: of an operand that has to be copied, named."""
    rows = 200_000_000
    one = torch.ones(1, 1, device="cuda")
    wide = one.expand(rows, 1000)  # stride 0: as it stands, 4 bytes; copied, 745 GiB
    with pytest.raises(RuntimeError, match=r"could not copy a of shape \(200000000, 1000\)"):
        op(wide, one.expand(1000, 1))
    torch.cuda.synchronize()
    assert torch.equal(op(one, one), one)


# ---- the same bits -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("M", "N", "K"),
    [
        pytest.param(2048, 2048, 512, id="whole-tiles-for-every-SM"),
        pytest.param(1027, 2049, 513, id="edges"),
        pytest.param(257, 129, 1025, id="few-blocks"),
        pytest.param(16, 16, 4096, id="one-long-sum"),
    ],
)
@products_too
def test_200_runs_give_the_same_bits(stage, M, N, K):
    """B75: a missing barrier corrupts a result now and then."""
    a, b = randn(M, K), randn(K, N)
    first = require_right(stage, a, b)
    different = sum((stage(a, b) != first).any() for _ in range(200))
    assert different.item() == 0


# ---- autograd and torch.compile ------------------------------------------------------------------


@products_too
def test_gradients(stage):
    a, b, c = (t.requires_grad_() for t in (randn(65, 33), randn(48, 33).t(), randn(48)))
    upstream = randn(48, 65).t()
    stage(a, b, c, alpha=0.5, beta=2.0).backward(upstream)
    with torch.no_grad():
        check.require(a.grad, check.reference(upstream, b.t(), alpha=0.5))
        check.require(b.grad, check.reference(a.t(), upstream, alpha=0.5))
        torch.testing.assert_close(c.grad, 2 * upstream.sum(0))


@two_stages
@pytest.mark.parametrize("layout", ["plain", "transposed", "empty"])
def test_opcheck(stage, layout):
    packet = getattr(torch.ops.sgemm, stage.__name__)
    a, b, c = {
        "plain": lambda: (randn(3, 4), randn(4, 5), randn(5)),
        "transposed": lambda: (randn(4, 3).t(), randn(5, 4).t(), randn(5, 3).t()),
        "empty": lambda: (randn(0, 4), randn(4, 5), randn(5)),
    }[layout]()
    torch.library.opcheck(packet.out, (a, b, c), {"beta": 0.5, "out": torch.empty_like(a @ b)})
    inputs = tuple(t.requires_grad_() for t in (a, b, c))
    torch.library.opcheck(packet.default, inputs, {"alpha": 2.0, "beta": 0.5})


@pytest.mark.parametrize("stage", ["stage0", "stage3", *PRODUCTS], indirect=True)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(stage, mode):
    """By inductor; "reduce-overhead" replays CUDA graphs."""
    pytest.importorskip("triton")
    torch._dynamo.reset()
    w1, w2, bias = randn(64, 96) / 8, randn(96, 32) / 8, randn(96)

    def model(x):
        return stage(stage(x, w1, bias, beta=1.0).relu(), w2)

    compiled = torch.compile(model, mode=mode, fullgraph=True)
    with torch.no_grad():
        for _ in range(5):
            x = randn(48, 64)
            assert torch.equal(compiled(x).clone(), model(x))
    x = randn(48, 64).requires_grad_()
    got, wanted = (torch.autograd.grad(f(x).sum(), x)[0] for f in (compiled, model))
    torch.testing.assert_close(got, wanted)
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(stage, dtype):
    """B90: FP32 in, FP32 out; half precision is an error that says so."""
    a, b = randn(33, 40), randn(40, 21)
    with torch.autocast("cuda", dtype):
        require_right(stage, a, b)
        with pytest.raises(RuntimeError, match=r"a must be float32, got (Half|BFloat16)"):
            stage(torch.mm(a, b), b.t())


def test_a_copied_operand_lives_until_it_is_read(stage):
    for i in range(1, 21):
        a = torch.full((512, 512), float(i), device="cuda")
        result = stage(a.t(), a)
        torch.full_like(a, float("nan"))  # takes the memory of a.t()'s copy
        assert (result == 512 * i * i).all()
