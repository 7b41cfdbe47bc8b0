"""The ladder's discipline, read from the sources: one list, one idea a file, one shape of file."""

import difflib
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from ladder_diff import PARENT

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"
FILES = sorted((CSRC / "stages").iterdir())

# The most code lines that a stage may add and remove against its parent, and who may do more.
BUDGET = 40
BUDGET_EXCEPTIONS: dict[str, tuple[int, str]] = {}  # number: (lines, why)

COLUMNS = 110


def number(file):
    """ "2b" of stage02b_tile32.cu."""
    match = re.fullmatch(r"stage(\d\d)([a-z]?)_[a-z][a-z0-9]*(_[a-z0-9]+)*\.cu", file.name)
    assert match, f"{file.name} is not named stageNN[x]_idea.cu"
    return f"{int(match[1])}{match[2]}"


def find(wanted):
    (file,) = (f for f in FILES if number(f) == wanted)
    return file


each_stage = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def without_comments(text):
    """C++ without its comments; strings stay, whatever is in them."""
    string = r'"(?:\\.|[^"\\\n])*"'
    return re.sub(
        rf"({string})|//[^\n]*|/\*.*?\*/", lambda match: match[1] or "", text, flags=re.DOTALL
    )


def code_lines(text):
    """The lines that count: without comments, blank lines and the stage's own number."""
    text = re.sub(r"\bsgemm::stage\d+[a-z]?\b", "sgemm::stageN", without_comments(text))
    return [line.rstrip() for line in text.splitlines() if line.strip()]


# ---- the one list -------------------------------------------------------------------------------


def listed():
    (stages,) = re.findall(
        r"#define SGEMM_STAGES\(X\)((?:.*\\\n)*.*)", (CSRC / "stages.h").read_text()
    )
    return re.findall(r"\bX\((\w+)\)", stages)


def test_list_is_the_files_in_order():
    """csrc/stages.h names each file of csrc/stages once, in the order of the ladder."""
    order = sorted(FILES, key=lambda f: (int(number(f).rstrip("abcdefgh")), number(f)))
    assert [f"stage{number(f)}" for f in order] == listed()
    assert order == FILES, "the files' names do not sort as the ladder goes"


def test_list_is_python_s():
    """torch_sgemm.STAGES is the list that is in the library, which is the one in stages.h."""
    torch_sgemm = pytest.importorskip("torch_sgemm", exc_type=ImportError)
    assert list(torch_sgemm.STAGES) == listed()


def test_tree_knows_every_stage():
    """Each stage has a parent that comes before it, except the first."""
    assert [f"stage{n}" for n in PARENT] == listed(), "enter the new stage in PARENT"
    for i, (n, parent) in enumerate(PARENT.items()):
        assert parent in list(PARENT)[:i] if i else parent is None, n


@pytest.mark.parametrize(
    "file", [f for f in CSRC.rglob("*") if f.is_file() and f.parent.name != "stages"], ids=str
)
def test_no_second_list(file):
    """No other file of csrc names a stage in its code: what is added to stages.h is everywhere."""
    if file == CSRC / "stages.h":
        assert re.search(r"\bstage\d", without_comments(file.read_text()))
    else:
        assert not re.search(r"\bstage\d+[a-z]?\b", without_comments(file.read_text()))


# ---- headers ------------------------------------------------------------------------------------

# A figure with a unit of speed. FLOP per byte is none: that is the algorithm's, not a run's.
SPEED = re.compile(
    r"""\d[\d.,]*x\b|\d[\d.,]*\s*(?:
        %|percent\b|[KMGTP]?FLOPS\b|[KMGTP]FLOP\b|[KMGTP]?FLOP/s|[KMGT]i?B/s
        |[munµ]s\b|(?:milli|micro|nano)?seconds?\b
        |(?:x|times)\ (?:as\ )?(?:fast|slow)
    )""",
    re.VERBOSE | re.IGNORECASE,
)


def header(text):
    """The stage's number and {field: text}; AssertionError for a bad header."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        lines.append(line)
    assert len(lines) <= 12, f"the header has {len(lines)} lines, of at most 12"
    title = re.fullmatch(r"// Stage (\d+[a-z]?): \S.*\.", lines[0])
    assert title, f"no title: {lines[0]}"
    assert lines[1] == "//", "the title is followed by an empty line"
    fields = {}
    for line in lines[2:]:
        field = re.fullmatch(r"//   ((?:[A-Z][a-z ]+):) +(\S.*)", line)
        if field:
            name = field[1].rstrip(":")
            assert line.index(field[2], len(name) + 6) == 16, f"text not in column 17: {line}"
            assert name not in fields, f"{name} twice"
            fields[name] = field[2]
        else:
            more = re.fullmatch(r"// {14}(\S.*)", line)
            assert more, f"neither a field nor the continuation of one: {line}"
            assert fields, f"the continuation of nothing: {line}"
            fields[name] += " " + more[1]
    assert not SPEED.search("\n".join(lines)), (
        f"a speed figure: {SPEED.search(chr(10).join(lines))[0]}"
    )
    side = title[1][-1].isalpha()
    expected = ["Branch of" if side else "Was slow", "Change", "Cost", "Slow now"]
    assert list(fields) == expected, f"fields {list(fields)}, expected {expected}"
    return title[1], fields


@each_stage
def test_header(file):
    """The fields, in their order; the stage's own number; the parent's words."""
    n, fields = header(file.read_text())
    assert n == number(file)
    parent = PARENT[n]
    if parent is None:
        assert fields["Was slow"] == "-"
    elif "Branch of" in fields:
        assert fields["Branch of"] == f"stage {parent}"
    else:
        _, parents = header(find(parent).read_text())
        assert fields["Was slow"] == parents["Slow now"]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("//   Cost:      ", "//   Price:     ", "fields"),
        ("//   Change:    ", "//   Cost:      ", "twice"),
        ("//   Cost:  ", "//   Cost:", "column 17"),
        ("//   Was slow:  ", "//   Branch of: ", "fields"),
        ("// Stage 2: ", "// Step 2: ", "no title"),
        ("\n//\n", "\n", "empty line"),
        ("two barriers a K tile", "two barriers\n// a K tile", "neither"),
        (
            "two barriers a K tile",
            "two barriers a K tile" + "\n//              and so on" * 7,
            "13 lines",
        ),
        *(
            ("two barriers a K tile", figure, "speed figure")
            for figure in ("1.5x", "12 TFLOP/s", "700 GFLOPS", "30 %", "1,234 ms", "3 times faster")
        ),
    ],
)
def test_header_notices(old, new, complaint):
    """What test_header rejects, planted in a good file one at a time."""
    text = find("2").read_text()
    header(text)
    assert text.count(old) == 1
    with pytest.raises(AssertionError, match=complaint):
        header(text.replace(old, new))


@pytest.mark.parametrize("text", ["0.25 FLOP per byte", "32x32 tile", "16 threads", "4 sectors"])
def test_figures_of_the_algorithm_are_no_speeds(text):
    """Shapes, counts and arithmetic intensity may stand in a header."""
    assert not SPEED.search(text)


# ---- the diff budget ----------------------------------------------------------------------------


def changed_lines(parent, child):
    """Code lines added plus code lines removed: a changed line is one of each."""
    blocks = difflib.SequenceMatcher(None, code_lines(parent), code_lines(child), autojunk=False)
    return sum(
        (i2 - i1) + (j2 - j1) for tag, i1, i2, j1, j2 in blocks.get_opcodes() if tag != "equal"
    )


@each_stage
def test_diff_budget(file):
    """A stage is one idea: at most 40 changed lines of code against its parent."""
    n = number(file)
    if PARENT[n] is None:
        assert n not in BUDGET_EXCEPTIONS
        return
    allowed, why = BUDGET_EXCEPTIONS.get(n, (BUDGET, ""))
    assert why or allowed == BUDGET, "an exception has a reason"
    count = changed_lines(find(PARENT[n]).read_text(), file.read_text())
    assert 0 < count <= allowed


def test_diff_budget_counts_code():
    """Comments, blank lines and the namespace are free; every other line counts."""
    base = find("2").read_text()
    marker = "  float acc = 0.0f;\n"
    assert base.count(marker) == 1

    def planted(text):
        return changed_lines(base, base.replace(marker, marker + text))

    assert planted("") == 0
    assert planted("  // a comment\n\n  /* another,\n     longer */\n") == 0
    assert changed_lines(base, base.replace("stage2", "stage2c")) == 0
    assert planted("  float x = 0.0f;\n") == 1
    assert planted('  const char* url = "http://x";\n') == 1
    assert changed_lines(base, base.replace(marker, "")) == 1
    assert changed_lines(base, base.replace(marker, "  float acc = 1.0f;\n")) == 2
    assert planted("".join(f"  float x{i} = 0.0f;\n" for i in range(BUDGET + 1))) == BUDGET + 1
    # The same line many times over is no junk that may be skipped.
    assert planted("    __syncthreads();\n" * 300) == 300


# ---- the shape of a stage -----------------------------------------------------------------------


def matching_brace(code, opening):
    depth = 0
    for i in range(opening, len(code)):
        depth += {"{": 1, "}": -1}.get(code[i], 0)
        if depth == 0:
            return i
    raise AssertionError("unbalanced braces")


def kernel_body(code):
    start = code.index("{", code.index(") void kernel("))
    return code[start : matching_brace(code, start)]


def require_stage(text, n):
    """AssertionError where a stage's file is not as style asks."""
    code = without_comments(text)
    assert re.findall(r"#\s*include\s*(\S+)", code) == ['"../gemm.cuh"'], "includes"
    assert re.findall(r"\bnamespace (\S+)", code) == [f"sgemm::stage{n}"], "namespace"
    assert text.endswith(f"\n}}  // namespace sgemm::stage{n}\n"), "namespace's end"

    assert len(re.findall(r"\b__global__\b", code)) == 1, "one kernel"
    kernel = re.search(
        r"template <Edge E(?:, class Tile)?(?:, bool \w+)?>\n"
        r"__global__ __launch_bounds__\([^)]*\) void kernel\(",
        code,
    )
    assert kernel, "kernel is a template of an Edge with launch bounds"
    launches = re.findall(r"\bcudaError_t (\w+)\(", code)
    assert set(launches) == {"launch"}, "one launch"
    body_end = matching_brace(code, code.index("{", kernel.end()))
    signature = r"cudaError_t launch\(const Problem& p, cudaStream_t stream\) \{"
    if template := re.match(rf"\}}\s+template <Edge E, class Tile>\s+{signature}", code[body_end:]):
        assert code.count("launch<Edge::k") == 2, "a template of launch is for two tiles"
        body_end = matching_brace(code, body_end + template.end() - 1)
    assert re.match(rf"\}}\s+{signature}", code[body_end:]), "launch under the kernel"
    end = matching_brace(code, code.index("{", body_end))
    assert code[end:].split() == ["}", "}"], "nothing under launch"

    copies = ["// global -> shared", "// shared -> registers -> acc"]
    loads = copies if "__shared__" in code else ["// global -> registers -> acc"]
    arrows = [c.strip() for c in re.findall(r"//.*->.*", text)]
    assert arrows == [*loads, "// registers -> global"], "section comments"

    # Arrays keep their dimensions: an index adds, and never multiplies or divides.
    for index in re.findall(r"\[([^\[\]]*)\]", kernel_body(code)):
        assert not re.search(r"[*/%]|<<|>>", index), f"flat index [{index}]"
    assert not re.search(r"\b[ABC]\.(?:data|ld|c_row|c_col)\b", code), "flat: not through Matrix"
    # 4, the floats in 16 bytes, is the one magic number.
    literals = set(re.findall(r"(?<![\w.])\d[\w.]*", kernel_body(code)))
    assert literals <= {"0", "0.0f", "1", "4"}, f"bare literals {sorted(literals)}"
    assert not re.search(r"\bassert\b", code), "device assert"
    for message in re.findall(r"static_assert\(([^;]*)\);", code):
        assert re.search(r'"[^"]*\b[A-Z][A-Z_]+\b[^"]*"', message), "static_assert without names"


@each_stage
def test_stage(file):
    """One kernel, its launcher under it, the same comment on the same section."""
    require_stage(file.read_text(), number(file))


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('#include "../gemm.cuh"', '#include "../gemm.cuh"\n#include <cuda_fp16.h>', "includes"),
        ("namespace sgemm::stage2 {", "namespace sgemm::stage3 {", "namespace"),
        ("}  // namespace sgemm::stage2\n", "}\n", "namespace's end"),
        ("template <Edge E>\n", "__global__ void other() {}\ntemplate <Edge E>\n", "one kernel"),
        ("__launch_bounds__(THREADS) ", "", "launch bounds"),
        ("cudaError_t launch(", "cudaError_t launch2() {}\ncudaError_t launch(", "one launch"),
        ("cudaError_t launch(", "inline int x = 1;\ncudaError_t launch(", "under the kernel"),
        ("}  // namespace", "inline int x = 1;\n}  // namespace", "nothing under"),
        ("// global -> shared", "// copy the tiles", "section comments"),
        ("// registers -> global", "// registers to global", "section comments"),
        ("As[BM][BK + PAD]", "As[BM * (BK + PAD)]", "flat"),
        ("Bs[k][thread_col]", "Bs[k * BN + thread_col]", "flat"),
        ("As[thread_row][k]", "As[thread_row][k % BK]", "flat"),
        ("acc += As[thread_row][k]", "acc += A.data[k]", "flat"),
        ("k0 += BK", "k0 += 16", "bare literals"),
        ("BK + PAD", "BK + PAD + 2", "bare literals"),
        ("each thread copies one element of As[BM][BK] and one of Bs[BK][BN]", "bad", "names"),
    ],
)
def test_stage_notices(old, new, complaint):
    """What test_stage rejects, planted in a good file one at a time."""
    text = find("2").read_text()
    require_stage(text, "2")
    assert text.count(old) == 1, old
    with pytest.raises(AssertionError, match=complaint):
        require_stage(text.replace(old, new), "2")


# ---- all of csrc --------------------------------------------------------------------------------


def faults(name, text):
    """What no file of csrc may have."""
    found = [
        f"line {i} is too long" for i, x in enumerate(text.splitlines(), 1) if len(x) > COLUMNS
    ]
    if not re.fullmatch(r"ops\w*\.(cpp|h)", name) and re.search(
        r"#\s*include\s*[<\"](?:torch|ATen|c10|pybind11|Python\.h)\b", text
    ):
        found.append("includes torch")
    found += [f"has a {word}" for word in re.findall(r"\b(?:TODO|FIXME|XXX|HACK)\b", text)]
    if "\t" in text or re.search(r"[ \t]+$", text, re.MULTILINE):
        found.append("has tabs or trailing blanks")
    return found


@pytest.mark.parametrize("file", [f for f in CSRC.rglob("*") if f.is_file()], ids=str)
def test_source(file):
    """Torch only in the op files; 110 columns; nothing left to do."""
    assert not faults(file.name, file.read_text())


def test_source_notices():
    """The faults that test_source is for; and the op files may include torch."""
    torch = "#include <torch/csrc/stable/library.h>\n"
    assert faults("gemm.cuh", torch) == ["includes torch"]
    assert faults("gemm.cuh", '# include "ATen/ATen.h"\n') == ["includes torch"]
    assert faults("ops.cpp", torch) == faults("ops_mm.cpp", torch) == []
    assert faults("a.h", "x" * 111) == ["line 1 is too long"]
    assert faults("a.h", "// TO" + "DO: later\n") == ["has a TO" + "DO"]
    assert faults("a.h", "int x; \n") == ["has tabs or trailing blanks"]


# ---- what nvcc makes of it ----------------------------------------------------------------------

NVCC = shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not on PATH")


def ptxas(source, tmp_path):
    """[(kernel's mangled name, stack bytes, spilled bytes)] of a stage compiled for Hopper."""
    done = subprocess.run(
        [
            NVCC,
            "-cubin",
            "-std=c++20",
            "-gencode=arch=compute_90a,code=sm_90a",
            "-Xptxas=-v",
            f"-I{CSRC}/stages",  # for the "../gemm.cuh" of a copy elsewhere
            "-o",
            tmp_path / "stage.cubin",
            source,
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    return [
        (name, int(stack), int(stores) + int(loads))
        for name, stack, stores, loads in re.findall(
            r"Function properties for (\S+)\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores, "
            r"(\d+) bytes spill loads",
            done.stderr,
        )
    ]


@needs_nvcc
@each_stage
def test_stage_keeps_to_registers(file, tmp_path):
    """No kernel of a stage spills, or keeps an array on its stack, for either kind of edge."""
    kernels = ptxas(file, tmp_path)
    edges = [re.search(r"EdgeE([01])E", name)[1] for name, _, _ in kernels]
    c_or_not = 2 if "bool ADD_C" in file.read_text() else 1
    assert sorted(edges) == ["0"] * c_or_not + ["1"] * c_or_not
    for name, stack, spilled in kernels:
        assert f"stage{number(file)}6kernel" in name
        assert (stack, spilled) == (0, 0), f"{stack} bytes of stack, {spilled} spilled: {name}"


@pytest.fixture
def planted(tmp_path):
    """ptxas() of stage 3 with an 8x8 tile a thread and (old, new) replaced."""

    def kernels(*replacements):
        text = find("3").read_text()
        for old, new in (
            ("BM = 16, BN = 16, BK = 16,", "BM = 32, BN = 32, BK = 32,"),
            ("TM = 2, TN = 2;", "TM = 8, TN = 8;"),
            *replacements,
        ):
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        source = tmp_path / "planted.cu"
        source.write_text(text)
        found = ptxas(source, tmp_path)
        assert len(found) == 2
        return found

    return kernels


@needs_nvcc
def test_spills_are_noticed(planted):
    """64 accumulators do not fit in 32 registers, which is what 2,048 threads an SM have."""
    squeezed = planted(
        ("MAX_THREADS = 256, MIN_BLOCKS = 4;", "MAX_THREADS = 1024, MIN_BLOCKS = 2;")
    )
    assert all(spilled > 0 for _, _, spilled in squeezed)


@needs_nvcc
def test_stack_arrays_are_noticed(planted):
    """An array whose index is known only at run time lives on the stack, and spills nothing."""
    indexed = planted(
        ("MIN_BLOCKS = 4;", "MIN_BLOCKS = 1;"),
        ("acc[i][j] += a[i]", "acc[(i + B.cols) % TM][j] += a[i]"),
    )
    assert all(stack > 0 and spilled == 0 for _, stack, spilled in indexed)
