"""What a new user's mistakes are answered with: the argument, what is expected of it, what it is,
and nothing of the C++ inside."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_sgemm
from torch_sgemm import STAGES, _build_info

NOISE = re.compile(r"\.(cpp|cu|cuh|h|hpp)\b|line \d+|0x[0-9a-f]{6,}|INTERNAL ASSERT|torch_call_|::")

M, K, N = 3, 4, 5


def good(device="cpu"):
    return {"a": torch.ones(M, K, device=device), "b": torch.ones(K, N, device=device)}


def refusal(op, error=RuntimeError, **arguments):
    """The text of the error that op(**arguments) raises, which must be fit for a user."""
    with pytest.raises(error) as caught:
        op(**arguments)
    text = str(caught.value)
    assert not NOISE.search(text), text
    assert "\n" not in text.strip(), text
    return text


def like(size, dtype=torch.float32):
    return lambda device: torch.ones(size, device=device).to(dtype)


WRONG = {
    # dtypes
    "half a": ({"a": like((M, K), torch.half)}, "a must be float32, got Half"),
    "half b": ({"b": like((K, N), torch.half)}, "b must be float32, got Half"),
    "bfloat16 b": ({"b": like((K, N), torch.bfloat16)}, "b must be float32, got BFloat16"),
    "double a": ({"a": like((M, K), torch.double)}, "a must be float32, got Double"),
    "whole numbers": ({"a": like((M, K), torch.long)}, "a must be float32, got Long"),
    "booleans": ({"a": like((M, K), torch.bool)}, "a must be float32, got Bool"),
    "complex b": ({"b": like((K, N), torch.cfloat)}, "b must be float32, got ComplexFloat"),
    "double c": ({"c": like((M, N), torch.double)}, "c must be float32, got Double"),
    "whole c": ({"c": like((N,), torch.long)}, "c must be float32, got Long"),
    "half out": ({"out": like((M, N), torch.half)}, "out must be float32, got Half"),
    # dimensions
    "number a": ({"a": like(())}, "a must be a matrix, got 0-D tensor of shape ()"),
    "vector a": ({"a": like((K,))}, "a must be a matrix, got 1-D tensor of shape (4,)"),
    "vector b": ({"b": like((K,))}, "b must be a matrix, got 1-D tensor of shape (4,)"),
    "batch a": ({"a": like((2, M, K))}, "a must be a matrix, got 3-D tensor of shape (2, 3, 4)"),
    "batch b": ({"b": like((2, K, N))}, "b must be a matrix, got 3-D tensor of shape (2, 4, 5)"),
    "batch out": (
        {"out": like((1, M, N))},
        "out must be a matrix, got 3-D tensor of shape (1, 3, 5)",
    ),
    # shapes
    "b transposed": (
        {"b": like((N, K))},
        "a and b shapes cannot be multiplied: a is (3, 4) and b is (5, 4), "
        "but a has 4 columns and b has 5 rows",
    ),
    "a without columns": (
        {"a": like((M, 0))},
        "a and b shapes cannot be multiplied: a is (3, 0) and b is (4, 5), "
        "but a has 0 columns and b has 4 rows",
    ),
    "c transposed": ({"c": like((N, M))}, "c must broadcast to (3, 5), got shape (5, 3)"),
    "c of M": ({"c": like((M,))}, "c must broadcast to (3, 5), got shape (3,)"),
    "c empty": ({"c": like((0,))}, "c must broadcast to (3, 5), got shape (0,)"),
    "c too large": ({"c": like((M + 1, N))}, "c must broadcast to (3, 5), got shape (4, 5)"),
    "batch c": ({"c": like((1, M, N))}, "c must broadcast to (3, 5), got shape (1, 3, 5)"),
    "out transposed": ({"out": like((N, M))}, "out must have shape (3, 5), got (5, 3)"),
    "out to broadcast": ({"out": like((1, N))}, "out must have shape (3, 5), got (1, 5)"),
    "out empty": ({"out": like((0, 0))}, "out must have shape (3, 5), got (0, 0)"),
}


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("kind", WRONG)
def test_wrong_tensors(stage, device, kind, beta):
    """Whatever beta is, so that a mistake does not wait for the first beta that is not 0."""
    wrong, text = WRONG[kind]
    arguments = good(device) | {name: make(device) for name, make in wrong.items()}
    assert refusal(stage, beta=beta, **arguments) == text


@pytest.mark.parametrize("kind", [k for k in WRONG if not k.endswith("out") and "out " not in k])
def test_wrong_tensors_that_want_gradients(stage, kind):
    """The same words: what prepares a derivative must not stumble first."""
    wrong, text = WRONG[kind]
    arguments = good() | {name: make("cpu") for name, make in wrong.items()}
    for tensor in arguments.values():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.requires_grad_()
    assert refusal(stage, **arguments) == text


def test_out_keeps_its_values_where_the_call_is_refused(stage, device):
    out = torch.full((M, N), 7.0, device=device)
    refusal(stage, **good(device) | {"b": torch.ones(N, K, device=device)}, out=out)
    assert (out == 7).all()


def test_several_mistakes_name_the_first(stage):
    assert refusal(stage, a=torch.ones(2).half(), b=torch.ones(3)).startswith("a must be a matrix")


@pytest.mark.parametrize("name", ["a", "b", "c", "alpha"])
def test_what_is_no_tensor(stage, name):
    arguments = good() | {name: "4"}
    with pytest.raises((RuntimeError, TypeError), match=f"for argument '{name}'") as caught:
        stage(**arguments)
    assert f"sgemm::{stage.__name__}()" in str(caught.value)


@pytest.mark.parametrize("name", ["a", "b"])
def test_no_tensor_at_all(stage, name):
    with pytest.raises((RuntimeError, TypeError)) as caught:
        stage(**good() | {name: None})
    assert re.search(rf"\b{name}\b", str(caught.value))
    with pytest.raises(TypeError, match=f"'{name}'"):
        stage(**{k: t for k, t in good().items() if k != name})


def test_alpha_and_beta_are_keywords(stage):
    with pytest.raises(TypeError, match="positional"):
        stage(torch.ones(M, K), torch.ones(K, N), None, 1.0)


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("layout", ["coo", "csr", "mkldnn"])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_layouts_without_a_kernel(stage, name, layout):
    """Torch's own words, which name the op and the layout."""
    convert = {
        "coo": torch.Tensor.to_sparse,
        "csr": torch.Tensor.to_sparse_csr,
        "mkldnn": torch.Tensor.to_mkldnn,
    }[layout]
    arguments = good()
    arguments[name] = convert(arguments[name])
    with pytest.raises(NotImplementedError, match=rf"sgemm::{stage.__name__}.*(Sparse|Mkldnn)"):
        stage(**arguments)


@pytest.mark.parametrize("name", ["a", "b", "c", "out"])
def test_meta_tensors_do_not_mix_with_real_ones(stage, name):
    """A result that was never computed must not look like one."""
    arguments = good() | {"c": torch.ones(M, N), "out": torch.ones(M, N)}
    arguments[name] = arguments[name].to("meta")
    assert "same device" in refusal(stage, beta=1.0, **arguments)


def test_meta_tensors_have_their_shapes_checked(stage):
    a, b = torch.ones(M, K, device="meta"), torch.ones(N, K, device="meta")
    assert "cannot be multiplied: a is (3, 4) and b is (5, 4)" in refusal(stage, a=a, b=b)
    assert "1-D" in refusal(stage, a=a, b=b[0])


def test_an_out_that_wants_gradients(stage):
    text = refusal(stage, **good(), out=torch.ones(M, N, requires_grad=True))
    assert "functions with out=... arguments don't support automatic differentiation" in text


def test_a_lazily_negated_out_is_refused_or_written(stage):
    """In a process of its own: it has corrupted memory."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"""if True:
            import torch, torch_sgemm
            op = torch_sgemm.STAGES["{stage.__name__}"]
            a, b = torch.full((3, 4), 2.0), torch.ones(4, 5)
            for grad in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                with grad():
                    out = torch._neg_view(torch.zeros(3, 5))
                    try:
                        op(a, b, out=out)
                    except RuntimeError as error:
                        assert "INTERNAL" not in str(error), error
                        assert "out" in str(error), error
                    else:
                        assert (out == 8).all(), out
                    assert a.shape == (3, 4) and (a == 2).all()
            print("fine")
            """,
        ],
        cwd=Path(torch_sgemm.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.parametrize(  # more than any address space, and more than 2^63 bytes
    ("rows", "size"), [(10_000_000, "372529.0 GiB"), (2_147_482_623, "17179852784.0 GiB")]
)
def test_a_result_too_large_for_memory(stage, device, rows, size):
    """The size that was asked for, in the user's terms."""
    one = torch.ones(1, 1, device=device)
    text = refusal(stage, a=one.expand(rows, 1), b=one.expand(1, rows))
    assert text.startswith(f"could not allocate the ({rows}, {rows}) result, {size}, on {device}")
    assert torch.equal(stage(one, one), one)


# ---- devices -------------------------------------------------------------------------------------


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["a", "b", "c", "out"])
@pytest.mark.parametrize(
    ("rest", "odd"),
    [
        ("cpu", "cuda:0"),
        ("cuda:0", "cpu"),
        pytest.param("cuda:0", "cuda:1", marks=two_gpus),
    ],
)
def test_tensors_on_two_devices(stage, name, rest, odd):
    """B48: a segmentation fault, or an error that does not say which tensor."""
    arguments = good(rest) | {n: torch.ones(M, N, device=rest) for n in ("c", "out")}
    arguments[name] = arguments[name].to(odd)
    on_a, other, on_other = (odd, "b", rest) if name == "a" else (rest, name, odd)
    assert refusal(stage, beta=1.0, **arguments) == (
        f"all tensors must be on the same device, but a is on {on_a} and {other} is on {on_other}"
    )


@pytest.mark.skipif(_build_info.CUDA is not None, reason="this build has CUDA kernels")
@pytest.mark.parametrize("op", [*STAGES.values(), torch_sgemm.cublas])
def test_a_build_without_cuda_says_why(op):
    """B49: garbage instead of an error for GPU tensors.

    Where there is no GPU either, the CUDA kernels are called on CPU tensors.
    """
    packet = getattr(torch.ops.sgemm, op.__name__)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    inputs = good().values()
    reason = f"this build of torch_sgemm has no CUDA kernels: {_build_info.NO_CUDA}"
    assert refusal(lambda: packet.default.redispatch(keys, *inputs)) == reason
    assert refusal(lambda: packet.out.redispatch(keys, *inputs, out=torch.ones(M, N))) == reason


def test_cublas_on_the_cpu():
    text = refusal(torch_sgemm.cublas, **good())
    assert "a must be on a CUDA device" in text
    assert "torch.mm or a stage" in text


def test_errors_leave_nothing_behind(stage):
    """After any refusal the same call without the mistake works."""
    for wrong, _ in WRONG.values():
        refusal(stage, **good() | {name: make("cpu") for name, make in wrong.items()})
    assert (stage(**good()) == K).all()


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_a_scalar_beyond_float32(stage, device, name):
    """Silently infinite otherwise; torch refuses it too."""
    a, b, c = (torch.ones(3, 3, device=device) for _ in range(3))
    with pytest.raises(RuntimeError, match=rf"^{name} must fit into float32, got 1e\+39"):
        stage(a, b, c, **{name: 1e39})


def test_a_scalar_that_float32_rounds_to_zero_reads_nothing(stage, device):
    """beta = 1e-50 is 0 to the kernel, so c is not read, whatever it holds."""
    a, bad = torch.ones(3, 3, device=device), torch.full((3, 3), float("inf"), device=device)
    assert (stage(a, a, bad, beta=1e-50) == 3).all()
    assert (stage(bad, a, a, alpha=1e-50, beta=2.0) == 2).all()
