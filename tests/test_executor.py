"""The CPU executor: csrc/host/simt.{h,cpp} alone, without torch, and its Ctrl-C through Python.

The launches are in executor_cases.cpp, which is compiled here and run as processes with a time
limit: a launch that hangs fails its test. What it finds in stages is in test_sanitize.py.
"""

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
CSRC = ROOT / "csrc"
CASES = TESTS / "executor_cases.cpp"
CXX = shutil.which("g++") or shutil.which("c++")
FLAGS = ["-x", "c++", "-std=c++20", "-O1", "-DSGEMM_HOST=", "-Wno-unknown-pragmas", f"-I{CSRC}"]

needs_compiler = pytest.mark.skipif(CXX is None, reason="no C++ compiler on PATH")


def compiler(*arguments):
    done = subprocess.run([CXX, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def compile_cpp(source, output, *flags):
    compiler(*FLAGS, *flags, "-c", source, "-o", output)
    return output


def link(output, *objects):
    compiler(*objects, "-pthread", "-o", output)
    return output


def run(program, *arguments, limit=30):
    """What the program prints; dying or taking longer than `limit` seconds is a failure."""
    done = subprocess.run(
        [str(program), *map(str, arguments)], capture_output=True, text=True, timeout=limit
    )
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def objects(tmp_path_factory):
    """What goes with simt.o."""
    folder = tmp_path_factory.mktemp("executor")
    return [
        compile_cpp(source, folder / f"{source.stem}.o")
        for source in (CASES, CSRC / "host" / "sectors.cpp")
    ]


@pytest.fixture(scope="session")
def cases(objects):
    folder = objects[0].parent
    simt = compile_cpp(CSRC / "host" / "simt.cpp", folder / "simt.o")
    return link(folder / "cases", simt, *objects)


def line(name):
    """file:line of the line in executor_cases.cpp that is marked with a name."""
    lines = CASES.read_text().splitlines()
    (found,) = (n for n, text in enumerate(lines, 1) if text.endswith(f"// line: {name}"))
    return f"{CASES.name}:{found}"


# ---- what each case has to print ----------------------------------------------------------------

BARRIER = "divergent barrier in block (0, 0, 0): thread "
AT = "waits at the __syncthreads() in "
ENDED = "threads have ended without reaching it"
HALF = f"{BARRIER}(0, 0, 0) {AT}{line('half')}, and 32 of the 64 {ENDED}"
TWO = f"{BARRIER}(0, 0, 0) {AT}{line('even')}, thread (63, 0, 0) at the one in {line('odd')}"
SCHEDULES = [(reverse, issue) for reverse in (0, 1) for issue in (0, 1)]
IN_FLIGHT = (
    "in flight: error: thread (31, 0, 0) of block (1, 0, 0) ended with 2 cp.async in flight\n"
)
AFTER = "after: done\nafter: 0 of 4 sums are wrong\n"
OVERRUN = "a thread of block (1, 0, 0) used more than its 64 KiB of stack"
OVERRUN_0 = OVERRUN.replace("(1,", "(0,")


def covered(threads):
    return f"cover: done\ncover: {threads} threads, 0 missed, 0 twice, 0 out of range, 0 changed\n"


EXPECTED = {
    # grid, block, OS threads, with a barrier
    "cover 1 1 1 1 1 1 2 1": covered(1),
    "cover 3 1 1 1024 1 1 2 1": covered(3072),
    "cover 3 1 1 1024 1 1 2 0": covered(3072),
    "cover 5 7 1 32 32 1 2 1": covered(35840),
    "cover 2 3 4 4 8 16 2 1": covered(12288),
    "cover 2 3 4 4 8 16 2 0": covered(12288),
    "cover 4 3 2 5 3 7 1 1": covered(2520),
    "cover 4 3 2 5 3 7 1 0": covered(2520),
    "cover 1 1 70000 3 1 1 2 1": covered(210000),
    # barriers that work: sums over a block in shared memory
    "sums": "sums: done\nsums: 0 of 30 sums are wrong\nsums: done\nsums: 0 of 40 sums are wrong\n",
    "shared": "shared: done\nshared: 0 mixed\n",
    # barriers that some threads miss
    "half": f"half: error: {HALF}\n",
    "later": "later: done\nlater: error: divergent barrier in block (2, 0, 0): thread (0, 0, 0) "
    f"{AT}{line('later')}, and 1 of the 32 {ENDED}\n",
    "one-of-1024": f"one: error: {BARRIER}(1023, 0, 0) {AT}{line('one')}, "
    f"and 1023 of the 1024 {ENDED}\n",
    "two": f"two: error: {TWO}\n",
    "two-and-an-exit": f"two: error: {BARRIER}(0, 0, 0) {AT}{line('even but last')}, thread "
    f"(61, 0, 0) at the one in {line('odd but last')}, and 1 of the 64 {ENDED}\n",
    # schedules: threads forward or in reverse, copies that land when issued or when waited for
    **{
        f"order {reverse} {issue}": "order: done\norder:"
        + (
            " 3 2 1 0 3 2 1 0 7 6 5 4 7 6 5 4\n"
            if reverse
            else " 0 1 2 3 0 1 2 3 4 5 6 7 4 5 6 7\n"
        )
        for reverse, issue in SCHEDULES
    },
    **{
        f"copies {reverse} {issue}": "copies: done\ncopies: "
        + (
            "issued xxx, two in flight xxx, one xxx, none xxx, committed xxx, \n"
            if issue
            else "issued ---, two in flight ---, one x--, none xx-, committed xxx, \n"
        )
        + "zeros: 1 0 0 0\nzeros: 0 0 0 0\nzeros: 0 5 5 5\nzeros: done\n"
        for reverse, issue in SCHEDULES
    },
    "in-flight": IN_FLIGHT * 2 + AFTER,
    "misaligned": "misaligned: error: thread (3, 0, 0) of block (0, 0, 0): cp.async between "
    "addresses that are not multiples of its 16 bytes\n",
    # copies of 16 bytes: in memory at multiples of them, in a thread's own variables anywhere
    "copy nowhere": "copy, nowhere: done\ncopy: 0 wrong\n",
    **{
        f"copy {where}": f"copy, {where}: error: thread (5, 0, 0) of block (0, 0, 0): a copy of 16 "
        "bytes at an address that is not a multiple of them\ncopy: 0 wrong\n"
        for where in ("global", "shared")
    },
    "copy own": "copy, own: done\ncopy: 0 wrong\n",
    # stacks
    "overrun": f"overrun: error: {OVERRUN}\n",
    "no-overrun": "overrun: done\n",
    # blocks no GPU would take, and grids without blocks
    "block 1024 1 1": "block: done\nblock: 1024 threads ran\n",
    "block 1025 1 1": "block: error: a block must have 1 to 1024 threads, got (1025, 1, 1)\n"
    "block: 0 threads ran\n",
    "block 32 33 1": "block: error: a block must have 1 to 1024 threads, got (32, 33, 1)\n"
    "block: 0 threads ran\n",
    "block 8 0 8": "block: error: a block must have 1 to 1024 threads, got (8, 0, 8)\n"
    "block: 0 threads ran\n",
    "nothing": "nothing: done\n" * 8 + "nothing: 0 threads ran\n",
    # streams
    "throws": "throws: logic_error: no threads today\n" * 2 + AFTER.replace("4", "3"),
    "two-callers": "two callers: right\n",
    **{
        f"serial {calls}": "serial: done\nserial: 0 of 3 sums are wrong\n"
        f"half: error: {HALF}\nserial: done\nserial: 0 of 3 sums are wrong\n"
        for calls in (1, 2, 3)
    },
    # Ctrl-C
    "not-interrupted": "asked: done\nasked: more than once, 0 times elsewhere\n",
    **{
        f"interrupt {where} {barriers}": "interrupt: error: interrupted\n"
        f"interrupt: in time, asked more than once, 0 times elsewhere\n{AFTER}"
        for where in ("caller", "other", "both")
        for barriers in (0, 1)
    },
    # after a failure
    "stopped": f"stopped: error: divergent barrier in block (10, 0, 0): thread (0, 0, 0) {AT}"
    f"{line('half')}, thread (63, 0, 0) at the one in {line('elsewhere')}\n"
    "stopped: few blocks begun\n"
    f"stopped in a block: error: {HALF.replace('block (0,', 'block (1,')}\nstopped: in time\n",
    "usable": (
        f"half: error: {HALF}\n"
        "after half: done\nafter half: 0 of 5 sums are wrong\n"
        f"two: error: {TWO}\n"
        "after two: done\nafter two: 0 of 3 sums are wrong\n"
        "bad block: error: a block must have 1 to 1024 threads, got (1025, 1, 1)\n"
        f"overrun: error: {OVERRUN}\n"
        "after overrun: done\nafter overrun: 0 of 4 sums are wrong\n"
        "interrupt: error: interrupted\n"
        "after interrupt: done\nafter interrupt: 0 of 4 sums are wrong\n"
    )
    * 5,
}


def normal(text):
    """Of several blocks that fail at once the first to say so is named: any of them will do."""
    return re.sub(r"block \([01], 0, 0\)", "block (0 or 1, 0, 0)", text)


@needs_compiler
@pytest.mark.parametrize("case", EXPECTED)
def test_launch(cases, case):
    """A launch does, or says, what a GPU programmer needs to know."""
    assert normal(run(cases, *case.split())) == normal(EXPECTED[case])


@needs_compiler
def test_overrun_of_the_first_stack_is_reported(cases):
    """A kernel without barriers runs on the first stack alone, and may overrun it too."""
    assert run(cases, "overrun-without-barriers") == f"overrun: error: {OVERRUN_0}\n"


@needs_compiler
def test_number_of_threads_does_not_wrap_around(cases):
    """3 x 1,431,655,766 threads are 2 modulo 2^32."""
    assert "error: a block must have 1 to 1024 threads" in run(cases, "block", 3, 1431655766, 1)


# ---- faults in the executor that the cases above have to find -----------------------------------

FAULTS = {
    "early exits are accepted": (
        "waiting == launch_->threads",
        "true",
        ["half", "later", "one-of-1024", "serial 1"],
    ),
    "different barriers are accepted": (
        "f.line != first->line ||",
        "false &&",
        ["two", "two-and-an-exit", "stopped"],
    ),
    "a file's barriers are all the same": (
        "if (f.line != first->line || std::strcmp(f.file, first->file) != 0) other = &f;",
        "",
        ["two"],
    ),
    "a failed block's fibers go on": (
        "if (launch_->stopped) abandon();",
        "",
        ["usable"],
    ),
    "other blocks are not stopped": ("return launch_->stopped;", "return false;", ["stopped"]),
    "threadIdx.y is wrong where the block is not square": (
        "static_cast<unsigned>(i / n.x % n.y)",
        "static_cast<unsigned>(i / n.y % n.y)",
        ["cover 4 3 2 5 3 7 1 1", "cover 4 3 2 5 3 7 1 0"],
    ),
    "threadIdx is another thread's after a barrier": (
        "threadIdx = fiber.thread;",
        "",
        ["cover 5 7 1 32 32 1 2 1"],
    ),
    "threads never run in reverse": (
        "reverse ? launch_->threads - 1 - index : index",
        "index",
        ["order 1 0"],
    ),
    "copies never land at issue": (
        "if (launch_->stream.schedule.land_at_issue) copy.land();",
        "",
        ["copies 0 1"],
    ),
    "copies always land at issue": (
        "if (launch_->stream.schedule.land_at_issue) copy.land();",
        "copy.land();",
        ["copies 0 0"],
    ),
    "a wait lands one group too many": (
        "copy.group + groups_in_flight >= self.group",
        "copy.group + groups_in_flight > self.group",
        ["copies 0 0"],
    ),
    "a wait lands one group too few": (
        "copy.group + groups_in_flight >= self.group",
        "copy.group + groups_in_flight + 1 >= self.group",
        ["copies 0 0"],
    ),
    "what a cp.async does not read is not zero": (
        "std::memcpy(copy.data, global, valid);",
        "std::memcpy(copy.data, global, bytes);",
        ["copies 0 0"],
    ),
    "a cp.async in flight is forgotten": ("if (!self.copies.empty())", "if (false)", ["in-flight"]),
    "a cp.async in flight is the next thread's": ("self.copies.clear();", "", ["in-flight"]),
    "any address will do for a cp.async": ("% bytes != 0)", "% 4 != 0)", ["misaligned"]),
    "any address will do for a copy": (
        "if (at >= own && at < own + current_->stack.bytes) return;",
        "return;",
        ["copy global", "copy shared"],
    ),
    "a thread's own variables need be aligned": (
        "if (at >= own && at < own + current_->stack.bytes) return;",
        "",
        ["copy own"],
    ),
    "a thread's own variables are the first's": (
        "static_cast<const char*>(current_->stack.bottom)",
        "stacks_",
        ["copy own"],
    ),
    "a thread is left out": (
        "for (next_thread_ = 0;",
        "for (next_thread_ = 1;",
        ["cover 1 1 70000 3 1 1 2 1", "cover 4 3 2 5 3 7 1 0", "sums"],
    ),
    "big blocks are accepted": ("!fits(block.x * block.y * block.z)", "false", ["block 32 33 1"]),
    "the canary is not looked at": ("sizeof kCanary) != 0", "sizeof kCanary) > 256", ["overrun"]),
    "every thread asks for Ctrl-C": (
        "if (std::this_thread::get_id() == launch_->caller) {",
        "if (true) {",
        ["interrupt other 1", "interrupt both 1"],
    ),
    "nobody asks for Ctrl-C in a long block": (
        "if (launch_->stream.interrupted()) launch_->fail",
        "if (false) launch_->fail",
        ["interrupt caller 1"],
    ),
    "an idle caller does not ask for Ctrl-C": (
        "if (std::this_thread::get_id() != launch.caller) return;",
        "return;",
        ["interrupt other 1"],
    ),
    "Ctrl-C is not told": (
        "if (!launch.error.empty()) throw",
        'if (!launch.error.empty() && launch.error != "interrupted") throw',
        ["interrupt caller 1", "interrupt other 1", "usable"],
    ),
}


@needs_compiler
@pytest.mark.parametrize("fault", FAULTS)
def test_cases_find_a_broken_executor(fault, objects, tmp_path):
    """Each fault in a copy of simt.cpp changes what the cases print, or kills or hangs them."""
    old, new, guards = FAULTS[fault]
    text = (CSRC / "host" / "simt.cpp").read_text()
    assert text.count(old) == 1, "the fault no longer fits simt.cpp: bring it up to date"
    broken = tmp_path / "simt.cpp"
    broken.write_text(text.replace(old, new))
    simt = compile_cpp(broken, tmp_path / "simt.o", f"-I{CSRC}/host")
    program = link(tmp_path / "cases", simt, *objects)
    for case in guards:
        try:
            printed = run(program, *case.split(), limit=3)
        except (AssertionError, subprocess.TimeoutExpired):
            continue
        assert normal(printed) != normal(EXPECTED[case]), f"{case} does not notice it"


# ---- Ctrl-C through Python ----------------------------------------------------------------------

PRELUDE = """
import ctypes, os, signal, sys, threading, time
sys.path.insert(0, {root!r})
import torch
import torch_sgemm

libc = ctypes.CDLL(None)

def handler():
    "The function that the system calls at SIGINT, whatever Python believes."
    action = (ctypes.c_uint64 * 64)()
    assert libc.sigaction(signal.SIGINT, None, action) == 0
    return action[0]

def ones(rows, columns):
    "Rows that share their memory."
    return torch.ones(1, columns).expand(rows, columns)

def endless():
    "Minutes of work, in a few megabytes."
    torch.ops.sgemm.stage0(ones(2000, 100000), ones(100000, 2000))

def short():
    return torch.ops.sgemm.stage2(ones(33, 50), ones(50, 17))

def seconds(count):
    "Work of at least that many seconds, in pieces that are long."
    end = time.monotonic() + count
    while time.monotonic() < end:
        assert (torch.ops.sgemm.stage0(ones(600, 600), ones(600, 600)) == 600).all()

signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever was inherited
"""

needs_build = pytest.mark.skipif(
    not (ROOT / "torch_sgemm" / "_C.abi3.so").exists(), reason="torch_sgemm is not built in place"
)


def interrupted(script, interrupts=1, after=1.0, limit=3.0):
    """Runs a script and sends SIGINT a while after each time that it prints "ready".

    Returns its exit status, what it printed, and what it complained of. It has `limit` seconds from
    the last signal to its end.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE.format(root=str(ROOT)) + script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    printed = ""
    try:
        for _ in range(interrupts):
            for text in process.stdout:
                printed += text
                if text == "ready\n":
                    break
            time.sleep(after)
            process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        pytest.fail(f"still running {limit} s after Ctrl-C; printed {printed!r}")
    finally:
        process.kill()
        process.wait()
    return process.returncode, printed + out, errors


@needs_build
def test_interrupt_ends_a_script():
    """Ctrl-C during minutes of work is a KeyboardInterrupt at once, and ends Python as ever."""
    code, printed, errors = interrupted('print("ready", flush=True)\nendless()\nprint("finished")')
    assert printed == "ready\n"
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert code == -signal.SIGINT


@needs_build
def test_interrupt_of_a_problem_that_needs_no_memory():
    """Both operands are one number, repeated along both axes: they are copied first."""
    code, _, errors = interrupted(
        "a = torch.ones(1, 1).expand(6000, 6000)\n"
        'print("ready", flush=True)\ntorch.ops.sgemm.stage0(a, a)'
    )
    assert (code, errors.splitlines()[-1]) == (-signal.SIGINT, "KeyboardInterrupt")


@needs_build
def test_interrupt_can_be_caught():
    """Afterwards the op works, Ctrl-C works again, and the handler is the one that was there."""
    code, printed, errors = interrupted(
        """
before = handler(), signal.getsignal(signal.SIGINT)
for _ in range(2):
    try:
        print("ready", flush=True)
        endless()
    except KeyboardInterrupt:
        print("caught", (short() == 50).all().item())
    print("same" if (handler(), signal.getsignal(signal.SIGINT)) == before else "changed")
""",
        interrupts=2,
    )
    assert code == 0, errors
    assert printed == "ready\ncaught True\nsame\n" * 2


@needs_build
@pytest.mark.parametrize("call", ["out", "grad", "stage2"])
def test_interrupt_of_every_kind_of_call(call):
    """out=, a call that is differentiated, and a kernel with barriers are interrupted alike."""
    calls = {
        "out": "torch.ops.sgemm.stage0.out(a, b, out=torch.empty(2000, 2000))",
        "grad": "torch.ops.sgemm.stage0(a, b.requires_grad_())",
        "stage2": "torch_sgemm.STAGES['stage2'](a, b)",
    }
    code, printed, errors = interrupted(
        f"""
a, b = ones(2000, 20000), ones(20000, 2000)
try:
    print("ready", flush=True)
    {calls[call]}
except KeyboardInterrupt:
    print("caught", (short() == 50).all().item())
"""
    )
    assert (code, printed) == (0, "ready\ncaught True\n"), errors


@needs_build
def test_interrupt_in_inference_mode():
    """Inference tensors never meet the Python kernel that turns an interrupted op's error into a
    KeyboardInterrupt: STAGES does it for them, and the bare op stops with its own words."""
    _, printed, errors = interrupted(
        """
with torch.inference_mode():
    a, b = ones(2000, 100000), ones(100000, 2000)
    try:
        print("ready", flush=True)
        torch_sgemm.STAGES["stage0"](a, b)
    except KeyboardInterrupt:
        print("caught", (short() == 50).all().item())
"""
    )
    assert printed == "ready\ncaught True\n", errors


@needs_build
def test_own_handler_is_called_and_stays():
    """A handler of the user's sees the Ctrl-C; where it does not raise, the op does."""
    code, printed, errors = interrupted(
        """
calls = []
def mine(number, frame):
    calls.append(number)
signal.signal(signal.SIGINT, mine)
before = handler()
try:
    print("ready", flush=True)
    endless()
except RuntimeError as error:
    print(error)
print(calls == [signal.SIGINT], signal.getsignal(signal.SIGINT) is mine, handler() == before)
signal.raise_signal(signal.SIGINT)
print(len(calls), (short() == 50).all().item())
"""
    )
    assert code == 0, errors
    assert printed == "ready\nstage0: interrupted\nTrue True True\n2 True\n"


@needs_build
@pytest.mark.parametrize("wanted", ["SIG_IGN", "SIG_DFL"])
def test_ignored_and_default_interrupts_stay_so(wanted):
    """Where Python has no handler none is put in its place, during the op as little as after it."""
    code, printed, errors = interrupted(
        f"""
signal.signal(signal.SIGINT, signal.{wanted})
before, during = handler(), set()
thread = threading.Thread(target=seconds, args=(2,))
thread.start()
print("ready", flush=True)
while thread.is_alive():
    during.add(handler())
    time.sleep(0.01)
print(handler() == before, during == {{before}})
""",
        limit=6,
    )
    if wanted == "SIG_IGN":
        assert (code, printed) == (0, "ready\nTrue True\n"), errors
    else:
        assert (code, printed, errors) == (-signal.SIGINT, "ready\n", "")


@needs_build
def test_two_threads_leave_the_handler_as_it_was():
    """Ops that begin and end in any order put the handler back; while one runs it is ours."""
    code, printed, errors = interrupted(
        """
before, during = handler(), set()
def work(size):
    for _ in range(200):
        torch.ops.sgemm.stage0(ones(size, 40), ones(40, size))
threads = [threading.Thread(target=work, args=(size,)) for size in (20, 50, 90, 130)]
threads.append(threading.Thread(target=seconds, args=(0.5,)))
for thread in threads:
    thread.start()
while any(thread.is_alive() for thread in threads):
    during.add(handler())
    time.sleep(0.001)
print(handler() == before, len(during - {before}))
signal.raise_signal(signal.SIGINT)
""",
        interrupts=0,
        limit=60,
    )
    assert printed == "True 1\n", errors
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert code == -signal.SIGINT


@needs_build
def test_interrupt_reaches_the_main_thread_while_another_computes():
    """The main thread waits, another is in an op: that op stops and Python goes on."""
    code, printed, errors = interrupted(
        """
ended = []
def work():
    try:
        endless()
    except RuntimeError as error:
        ended.append(str(error))
thread = threading.Thread(target=work)
thread.start()
try:
    print("ready", flush=True)
    while thread.is_alive():
        time.sleep(0.01)
    time.sleep(1)
except KeyboardInterrupt:
    thread.join()
    print("caught", *ended)
"""
    )
    assert (code, printed) == (0, "ready\ncaught stage0: interrupted\n"), errors


@needs_build
def test_interrupt_test_notices_what_does_not_stop():
    """The limit of the tests above is a limit."""
    stubborn = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('ready', flush=True)\nendless()"
    with pytest.raises(pytest.fail.Exception, match="still running"):
        interrupted(stubborn, after=0.1, limit=0.5)
