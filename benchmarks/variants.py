"""A stage with other constants: compiled without a GPU, measured without a compiler.

A variant is made from the stage's own source, so that it cannot drift from it: constants get other
values, the launch bounds other arguments. compile() makes a small library of each variant and a
manifest.json with what ptxas says of its kernels; load() reads that back, and refuses it where a
source has changed since; measure() checks and times the libraries.

Benchmarks call these functions; the command below is what they start under Nsight Compute.

    python benchmarks/variants.py --launch JOB.json     launches each library of a job once
"""

import argparse
import concurrent.futures
import ctypes
import dataclasses
import hashlib
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import check
import counters
import ladder
import report
import timing
import torch

MANIFEST = "manifest.json"
DEFAULT_ARCH = "9.0a"
COMPILE_SECONDS = 900  # of one variant
SETUP_SECONDS = 300  # until a worker has torch, its inputs and their float64 product
TURN_SECONDS = 60  # of one check or sample

Progress = Callable[[str], None]


class VariantError(Exception):
    """A variant, or a folder of them, that cannot be used; the text says why."""


@dataclass(frozen=True)
class Variant:
    """A stage, and what is different about it."""

    stage: str
    label: str  # unique among the variants that are compiled together
    constants: dict[str, int] = field(default_factory=dict)
    launch_bounds: str | None = None  # None: as in the source; "": no __launch_bounds__ at all
    unroll: str | None = None  # the line in place of #pragma unroll; None: as in the source
    replace: tuple[tuple[str, str], ...] = ()  # (old, new); old stands once in the source

    def __str__(self) -> str:
        changes = [f"{name} = {value}" for name, value in self.constants.items()]
        if self.launch_bounds is not None:
            bounds = f"__launch_bounds__({self.launch_bounds})"
            changes.append(bounds if self.launch_bounds else "no __launch_bounds__")
        if self.unroll is not None:
            changes.append(self.unroll or "no #pragma unroll")
        changes += [f"'{new.strip()}' for '{old.strip()}'" for old, new in self.replace]
        return f"{self.stage} with {', '.join(changes)}" if changes else self.stage


@dataclass(frozen=True)
class Resources:
    """What ptxas says of one kernel for one architecture. Spills are stores and loads together."""

    arch: str
    kernel: str  # mangled
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int  # static

    @property
    def exact(self) -> bool:
        """Whether this is the instance for matrices that the tiles cover exactly."""
        return "EdgeE0E" in self.kernel


@dataclass(frozen=True)
class Built:
    """A compiled variant: a library, or the error that there is none for."""

    variant: Variant
    library: Path | None
    resources: tuple[Resources, ...] = ()
    error: str = ""

    def find(self, arch: str, kernel: str | None = None) -> Resources:
        """Of this kernel; without a name of the kernel for exact matrices."""
        return next(
            r
            for r in self.resources
            if r.arch == arch and (r.exact if kernel is None else r.kernel == kernel)
        )


# ---- a variant's source --------------------------------------------------------------------------

# The entries of a library. inspect() captures the launch, and so learns which kernel it is and how
# large its block, however the stage launches.
SHIM = r"""
#line 1 "the shim of benchmarks/variants.py"
#include <cuda_runtime.h>

#define SGEMM_EXPORT extern "C" __attribute__((visibility("default")))
#define SGEMM_TRY(call) \
  if (const cudaError_t error = (call); error != cudaSuccess) return error

struct Launch {  // variants.Launch
  const char* kernel;
  int threads, registers, blocks, max_threads;
};

static cudaError_t look(cudaGraph_t graph, Launch* launch) {
  cudaGraphNode_t node = nullptr;
  size_t count = 1;
  SGEMM_TRY(cudaGraphGetRootNodes(graph, &node, &count));
  cudaKernelNodeParams params{};
  SGEMM_TRY(cudaGraphKernelNodeGetParams(node, &params));
  cudaFuncAttributes attributes{};
  SGEMM_TRY(cudaFuncGetAttributes(&attributes, params.func));
  launch->threads = params.blockDim.x * params.blockDim.y * params.blockDim.z;
  launch->registers = attributes.numRegs;
  SGEMM_TRY(cudaFuncGetName(&launch->kernel, params.func));
  SGEMM_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &launch->blocks, params.func, launch->threads, params.sharedMemBytes));
  const cudaDeviceAttr max_threads = cudaDevAttrMaxThreadsPerMultiProcessor;
  int device = 0;
  SGEMM_TRY(cudaGetDevice(&device));
  return cudaDeviceGetAttribute(&launch->max_threads, max_threads, device);
}

SGEMM_EXPORT cudaError_t run(const sgemm::Problem* p, cudaStream_t stream) {
  return sgemm::SGEMM_STAGE::launch(*p, stream);
}

SGEMM_EXPORT cudaError_t inspect(const sgemm::Problem* p, Launch* launch) {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  SGEMM_TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaError_t result = cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed);
  if (result == cudaSuccess) {
    result = run(p, stream);
    const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
    if (result == cudaSuccess) result = ended;
  }
  if (result == cudaSuccess) result = look(graph, launch);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return result;
}

SGEMM_EXPORT const char* explain(cudaError_t error) { return cudaGetErrorString(error); }
"""

_DECLARATION = re.compile(r"^[ \t]*(?:static )?constexpr (?:int|bool) ([^;]*);", re.MULTILINE)
_CONSTANT = re.compile(r"\b([A-Z][A-Z0-9_]*) = ((?:[^,;()]|\([^()]*\))+)")
_STRUCT = re.compile(r"^struct (\w+) \{.*?^\};", re.MULTILINE | re.DOTALL)
_BOUNDS = re.compile(r"__launch_bounds__\((?:[^()]|\([^()]*\))*\) ?")


def stage_file(stage: str) -> Path:
    file = report.stage_file(stage)
    if file is None:
        raise VariantError(f"there is no stage '{stage}' in csrc/stages")
    return file


def constants(text: str) -> dict[str, tuple[int, int]]:
    """The named constants of a stage: where the value of each stands.

    Of several tiles those of struct Shipped.
    """
    found: dict[str, tuple[int, int]] = {}
    others = [m.span() for m in _STRUCT.finditer(text) if m[1] != "Shipped"]
    for statement in _DECLARATION.finditer(text):
        if any(start < statement.start() < end for start, end in others):
            continue
        for match in _CONSTANT.finditer(text, *statement.span(1)):
            if match[2].startswith("Tile::"):  # a short name for the tile's
                continue
            if match[1] in found:
                raise VariantError(f"the constant {match[1]} is declared twice")
            found[match[1]] = match.span(2)
    return found


def source(variant: Variant) -> str:
    """The stage's text with the variant's changes, and the shim under it."""
    file = stage_file(variant.stage)
    text = file.read_text()
    known = constants(text)
    for name in variant.constants:
        if name not in known:
            raise VariantError(
                f"{variant}: {file.relative_to(report.ROOT)} has no constant {name}; "
                f"it has {', '.join(known)}"
            )
    # From the back, as a change moves what is behind it.
    for name in sorted(variant.constants, key=known.__getitem__, reverse=True):
        start, end = known[name]
        text = text[:start] + str(variant.constants[name]) + text[end:]
    if variant.launch_bounds is not None:
        bounds = f"__launch_bounds__({variant.launch_bounds}) " if variant.launch_bounds else ""
        text, count = _BOUNDS.subn(bounds, text)
        if count != 1:
            raise VariantError(f"{variant}: expected one __launch_bounds__, found {count}")
    if variant.unroll is not None:
        if text.count("#pragma unroll\n") != 1:
            raise VariantError(f"{variant}: expected one #pragma unroll in the source")
        text = text.replace("#pragma unroll\n", f"{variant.unroll}\n")
    for old, new in variant.replace:
        if (count := text.count(old)) != 1:
            raise VariantError(
                f"{variant}: expected '{old}' once in the source, found it {count} times"
            )
        text = text.replace(old, new)
    line = f'#line 1 "{file.relative_to(report.ROOT)}"\n'
    return line + text + SHIM.replace("SGEMM_STAGE::", f"{variant.stage}::")


def broken_assertion(error: str) -> str:
    """The text of the static_assert that a variant breaks; nothing for any other error."""
    found = re.search(r'static assertion failed with "(.*)"', error)
    return found[1] if found else ""


def sources(stage: str) -> dict[str, str]:
    """Hashes of everything that this stage's variants are made of, by name."""
    found = {"the shim": _hash(SHIM)}
    todo = [stage_file(stage)]
    while todo:
        file = todo.pop().resolve()
        name = str(file.relative_to(report.ROOT.resolve()))
        if name in found:
            continue
        text = file.read_text()
        found[name] = _hash(text)
        included = re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.MULTILINE)
        todo += [file.parent / i for i in included if not i.startswith("host/")]  # SGEMM_HOST's
    return found


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# ---- compiling -----------------------------------------------------------------------------------


def default_archs() -> list[str]:
    """This machine's GPU, or DEFAULT_ARCH where there is none."""
    if not torch.cuda.is_available():
        return [DEFAULT_ARCH]
    major, minor = torch.cuda.get_device_capability()
    return [f"{major}.{minor}{'a' * (major == 9)}"]


def nvcc() -> str:
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc") or (home and shutil.which("nvcc", path=f"{home}/bin"))
    if not found:
        raise VariantError(
            "there is no nvcc on PATH, nor in CUDA_HOME: compile where the CUDA toolkit is "
            "(--compile DIR), and measure that folder here (--measure DIR)"
        )
    return found


def _command(archs: Sequence[str]) -> list[str]:
    targets = []
    for arch in archs:
        if not re.fullmatch(r"\d+\.\d[af]?", arch):
            raise VariantError(f"expected an architecture like 9.0a or 8.0, got '{arch}'")
        number = arch.replace(".", "")
        targets.append(f"-gencode=arch=compute_{number},code=sm_{number}")
    return [
        *("-std=c++20", "-O3", "-shared", "-cudart=shared", "-Xlinker=-s", "-Xptxas=-v"),
        *("-diag-suppress=177", "-Xcompiler=-fPIC,-fvisibility=hidden"),  # unused constants
        *targets,
    ]


def compile(
    variants: Sequence[Variant],
    folder: Path,
    archs: Sequence[str] | None = None,
    progress: Progress = lambda label: None,
) -> list[Built]:
    """A library of each, for these architectures (as in TORCH_CUDA_ARCH_LIST), and the manifest.

    A variant that does not compile is in the list with its error. Libraries that the folder has
    already and that would come out the same are kept.
    """
    folder = Path(folder)
    texts = {variant.label: source(variant) for variant in variants}
    if len(texts) != len(variants):
        raise VariantError("two variants have the same label")
    command = [nvcc(), *_command(archs or default_archs())]
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True).stdout
    hashes = {stage: sources(stage) for stage in {variant.stage for variant in variants}}
    folder.mkdir(parents=True, exist_ok=True)
    before = _entries(folder) if (folder / MANIFEST).exists() else []
    kept = {entry["key"]: entry for entry in before if (folder / entry["library"]).exists()}

    def make(variant: Variant) -> dict:
        text = texts[variant.label]
        key = _hash(json.dumps([text, hashes[variant.stage], command[1:], version]))
        entry = {
            "variant": dataclasses.asdict(variant),
            "sources": hashes[variant.stage],
            "key": key,
            "library": f"{_slug(variant.label)}-{key[:8]}.so",
            "resources": [],
            "error": "",
        }
        if key in kept and not kept[key]["error"]:
            return kept[key] | {"variant": entry["variant"]}
        file = (folder / entry["library"]).with_suffix(".cu")
        file.write_text(text)
        try:
            found = _nvcc(command, file, folder / entry["library"])
        except VariantError as error:
            return entry | {"error": f"{variant}: {error}"}
        return entry | {"resources": [dataclasses.asdict(r) for r in found]}

    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        jobs = {pool.submit(make, variant): variant for variant in variants}
        for job in concurrent.futures.as_completed(jobs):
            progress(jobs[job].label)
    entries = [job.result() for job in jobs]
    manifest = {"compiler": version.strip().split("\n")[-1], "variants": entries}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    for old in {entry["library"] for entry in before} - {entry["library"] for entry in entries}:
        for suffix in (".so", ".cu"):
            (folder / old).with_suffix(suffix).unlink(missing_ok=True)
    return load(folder)


def _slug(label: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")


def _nvcc(command: list[str], file: Path, library: Path) -> list[Resources]:
    # The stage includes "../gemm.cuh", seen from csrc/stages.
    command = [*command, f"-I{report.ROOT}/csrc/stages", "-o", str(library), str(file)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired:
        raise VariantError(f"nvcc took more than {COMPILE_SECONDS} s") from None
    output = done.stdout + done.stderr
    if done.returncode:
        first = re.search(r"^.*\b(?:error|fatal)\b.*$", output, re.MULTILINE)
        why = first[0].strip() if first else output.strip() or f"nvcc ended with {done.returncode}"
        raise VariantError(f"it does not compile: {why}")
    found = ptxas(output)
    if not found:
        raise VariantError("ptxas said nothing of its kernels")
    return found


def ptxas(output: str) -> list[Resources]:
    """What `-Xptxas -v` says of each kernel."""
    found = []
    for part in output.split("Compiling entry function ")[1:]:
        name = re.match(r"'(\S+)' for '(\S+)'", part)
        stack = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part
        )
        used = re.search(r"Used (\d+) registers.*", part)
        if not (name and stack and used):
            raise VariantError(f"ptxas's report has an unknown form: {part[:200]}")
        shared = re.search(r"(\d+) bytes smem", used[0])
        found.append(
            Resources(
                arch=name[2],
                kernel=name[1],
                registers=int(used[1]),
                spill_bytes=int(stack[2]) + int(stack[3]),
                stack_bytes=int(stack[1]),
                shared_bytes=int(shared[1]) if shared else 0,
            )
        )
    return found


# ---- the manifest --------------------------------------------------------------------------------


def _entries(folder: Path) -> list[dict]:
    path = folder / MANIFEST
    try:
        return json.loads(path.read_text())["variants"]
    except FileNotFoundError:
        raise VariantError(f"there is no {path}: write it with --compile {folder}") from None
    except (ValueError, KeyError, TypeError):
        raise VariantError(f"{path} is no manifest: delete it, and --compile {folder}") from None


def load(folder: Path, wanted: Sequence[Variant] | None = None) -> list[Built]:
    """What compile() made: all of it, or the wanted ones in their order."""
    folder = Path(folder)
    found: dict[str, Built] = {}
    for entry in _entries(folder):
        pairs = tuple((old, new) for old, new in entry["variant"]["replace"])
        variant = Variant(**entry["variant"] | {"replace": pairs})
        now = sources(variant.stage)
        changed = sorted(
            name for name in now | entry["sources"] if now.get(name) != entry["sources"].get(name)
        )
        if changed:
            raise VariantError(
                f"{folder / MANIFEST} is stale: {', '.join(changed)} changed since; "
                f"compile again with --compile {folder}"
            )
        library = None if entry["error"] else folder / entry["library"]
        if library and not library.exists():
            raise VariantError(f"{library} is missing: compile again with --compile {folder}")
        resources = tuple(Resources(**r) for r in entry["resources"])
        found[variant.label] = Built(variant, library, resources, entry["error"])
    if wanted is None:
        return list(found.values())
    for variant in wanted:
        if variant.label not in found or found[variant.label].variant != variant:
            raise VariantError(
                f"{folder / MANIFEST} has no '{variant.label}' ({variant}): "
                f"compile again with --compile {folder}"
            )
    return [found[variant.label] for variant in wanted]


def arch_of(device: str, built: Sequence[Built]) -> str:
    """The architecture, of those compiled for, whose code this device runs."""
    archs = sorted({r.arch for b in built for r in b.resources})
    if device == "cpu":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    fits = [f"sm_{major}{minor}a", f"sm_{major}{minor}f"]
    fits += [f"sm_{major}{m}" for m in range(minor, -1, -1)]
    for arch in fits:
        if arch in archs:
            return arch
    raise VariantError(
        f"compiled for {', '.join(archs) or 'nothing'}, and {report.device_name(device)} is "
        f"sm_{major}{minor}: compile again with --arch {major}.{minor}"
    )


# ---- a library -----------------------------------------------------------------------------------


class Problem(ctypes.Structure):
    """csrc/gemm.h: struct Problem."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("M", "N", "K")),
        *((name, ctypes.c_void_p) for name in ("A", "B", "c", "out")),
        *((name, ctypes.c_int64) for name in ("lda", "ldb", "ldo", "c_row", "c_col")),
        *((name, ctypes.c_float) for name in ("alpha", "beta")),
    )


class Launch(ctypes.Structure):
    """How a library launches its kernel: the shim's struct Launch."""

    _fields_ = (
        ("kernel", ctypes.c_char_p),
        *((name, ctypes.c_int) for name in ("threads", "registers", "blocks", "max_threads")),
    )

    @property
    def occupancy(self) -> float:
        """Warps that fit on a multiprocessor together, of those that it can hold."""
        return self.blocks * -(-self.threads // 32) / (self.max_threads / 32)


class Library:
    """A variant, ready to be launched: library(a, b, out) on torch's current stream."""

    def __init__(self, path: Path):
        self._library = ctypes.CDLL(str(path))  # torch has loaded the CUDA runtime that it needs
        pointer = ctypes.POINTER(Problem)
        self._library.run.argtypes = [pointer, ctypes.c_void_p]
        self._library.inspect.argtypes = [pointer, ctypes.POINTER(Launch)]
        self._library.explain.restype = ctypes.c_char_p

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        stream = torch.cuda.current_stream(a.device).cuda_stream if a.is_cuda else None
        self._succeed("its launch", self._library.run(_problem(a, b, out), stream))

    def inspect(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Launch:
        launch = Launch()
        self._succeed("asking how it launches", self._library.inspect(_problem(a, b, out), launch))
        return launch

    def _succeed(self, what: str, error: int) -> None:
        if error:
            text = self._library.explain(error).decode()
            raise VariantError(f"{what} failed: {text} (CUDA error {error})")


def _problem(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Problem:
    (M, K), N = a.shape, b.shape[1]
    pointers = a.data_ptr(), b.data_ptr(), None, out.data_ptr()
    return Problem(M, N, K, *pointers, a.stride(0), b.stride(0), out.stride(0), 0, 0, 1.0, 0.0)


# ---- measuring -----------------------------------------------------------------------------------


@dataclass
class Measured:
    """A variant's figures, or the failure that there are none for."""

    built: Built
    failure: str = ""
    note: str = ""  # why there are no resources and no occupancy
    errors: check.Errors | None = None
    resources: Resources | None = None  # of the kernel that ran
    threads: int | None = None  # a block
    occupancy: float | None = None  # the theoretical one
    time: timing.Timing | None = None


def measure(
    built: Sequence[Built],
    size: tuple[int, int, int],
    reps: int,
    device: str = "cuda",
    peak: float = math.inf,
    progress: Callable[[str, str], None] = lambda label, what: None,
    patience: float = TURN_SECONDS,
) -> list[Measured]:
    """Checks each variant against the error rule, then times those that are right, interleaved.

    That happens in a process of its own, as a kernel that crashes takes every other of its process
    along: then the one to blame is put down as failed, and a new process takes up the rest. So with
    one that does not end within `patience` seconds. `peak` is in FLOP/s.
    """
    arch = arch_of(device, built)
    results = {b.variant.label: Measured(b, failure=b.error) for b in built}
    flop = 2 * math.prod(size)
    while todo := [label for label, r in results.items() if not r.failure and not r.time]:
        paths = {label: results[label].built.library for label in todo}
        known = {label for label in todo if results[label].errors}
        turn = ""
        for kind, label, value in _session((paths, known, size, reps, device), patience):
            if kind == "turn":
                turn = label
                progress(label, value)
            elif kind == "checked":
                results[label].errors, launch = value
                _put_down(results[label], arch, launch)
            elif kind == "failed":
                results[label].failure = value
            elif kind == "timed":
                results[label].time = value
            elif turn and not results[turn].failure:
                results[turn].failure = value
            else:  # no variant's fault, so another process would do no better
                raise check.CheckError(f"the measuring process {value}")
    for label, r in results.items():
        if r.failure:
            r.time = None
        elif r.time:
            try:
                check.require_below_peak(flop / r.time.median / 1e12, peak / 1e12, label)
            except check.CheckError as error:
                r.failure, r.time = str(error), None
    return list(results.values())


def _put_down(result: Measured, arch: str, launch: dict | str) -> None:
    if isinstance(launch, str):
        result.note = launch
        return
    result.threads, result.occupancy = launch["threads"], launch["occupancy"]
    try:
        result.resources = result.built.find(arch, launch["kernel"])
    except StopIteration:
        result.note = f"the manifest has no {launch['kernel']} for {arch}"
        return
    if result.resources.registers != launch["registers"]:
        result.failure = (
            f"its kernel has {launch['registers']} registers and its manifest says "
            f"{result.resources.registers}: the library is not the manifest's"
        )


def _session(job: tuple, patience: float) -> Iterator[tuple[str, str, object]]:
    """What a worker says of a job: (kind, label, value). The last is 'died' where it failed."""
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    ours, theirs = context.Pipe(duplex=False)
    worker = context.Process(target=_work, args=(theirs, job), daemon=True)
    worker.start()
    theirs.close()
    wait = SETUP_SECONDS
    try:
        while True:
            if not ours.poll(wait):
                yield "died", "", f"did not end within {wait:g} s"
                return
            message = ours.recv()
            if message[0] == "end":
                return
            yield message
            wait = patience if message[0] == "turn" else wait
    except EOFError:
        worker.join(10)
        code = worker.exitcode
        how = signal.Signals(-code).name if code and code < 0 else f"exit status {code}"
        yield "died", "", f"crashed ({how})"
    finally:
        worker.kill()
        worker.join()


def _work(pipe, job: tuple) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's, which then ends this process
    try:
        _check_and_time(pipe.send, *job)
        pipe.send(("end", "", None))
    except Exception as error:
        text = str(error).strip() or "no reason given"
        pipe.send(("died", "", f"failed with {type(error).__name__}: " + text.split("\n")[0]))


def _check_and_time(send, paths, known, size, reps, device) -> None:
    problem = ladder.Ladder(*size, device, ladder.input_sets(*size, device))
    operands = problem.a[0], problem.b[0], problem.out
    timing.synchronize(device)
    calls = {}
    for label, path in paths.items():
        send(("turn", label, "check"))
        try:
            library = Library(path)
            if label not in known:
                found = check.require(problem.result(library), problem.exact, "its result")
                send(("checked", label, (found, _launch(library, operands))))
        except (check.CheckError, VariantError, OSError) as error:
            send(("failed", label, str(error)))
            continue
        calls[label] = _announced(problem.call(library), send, ("turn", label, "time"))
    found = timing.interleaved(
        calls,
        device,
        reps,
        lambda label: send(("turn", label, "time")),
        period=len(problem.a),
    )
    for label, time in found.items():
        send(("timed", label, time))


def _launch(library: Library, operands: tuple) -> dict | str:
    try:
        launch = library.inspect(*operands)
    except VariantError as error:
        return str(error)
    return {
        "kernel": launch.kernel.decode(),
        "threads": launch.threads,
        "registers": launch.registers,
        "occupancy": launch.occupancy,
    }


def _announced(call: timing.Call, send, message: tuple) -> timing.Call:
    """Tells of the first call, which comes before timing tells whose turn it is."""
    first = [message]

    def announced(i: int) -> None:
        if first:
            send(first.pop())
        call(i)

    return announced


# ---- counters ------------------------------------------------------------------------------------


def achieved_occupancy(
    built: Sequence[Built], size: tuple[int, int, int], device: str = "cuda"
) -> dict[str, float]:
    """By ncu: the warps that were resident, of those that a multiprocessor can hold."""
    metric = counters.METRICS["occupancy_pct"]
    counted = count(built, size, [metric], device)
    return {label: values[metric] / 100 for label, values in counted.items()}


def count(
    built: Sequence[Built],
    size: tuple[int, int, int],
    metrics: Sequence[str],
    device: str = "cuda",
) -> dict[str, dict[str, float]]:
    """ncu's metrics of one launch of each variant: label -> metric -> value."""
    libraries = [str(Path(b.library).resolve()) for b in built]
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.json")
        job.write_text(json.dumps({"libraries": libraries, "size": size, "device": device}))
        program = [str(Path(__file__).resolve()), "--launch", str(job)]
        launches = counters.ncu(program, "^kernel$", metrics)
    if len(launches) != len(built):
        raise counters.CountersError(f"ncu saw {len(launches)} launches of {len(built)} variants")
    values = (launch.values for launch in launches)
    return dict(zip((b.variant.label for b in built), values, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--launch", metavar="JOB.json", type=Path, required=True)
    job = json.loads(parser.parse_args().launch.read_text())
    (M, N, K), device = job["size"], job["device"]
    a, b = torch.randn(M, K, device=device), torch.randn(K, N, device=device)
    out = torch.empty(M, N, device=device)
    for path in job["libraries"]:
        Library(path)(a, b, out)
        timing.synchronize(device)


if __name__ == "__main__":
    main()
