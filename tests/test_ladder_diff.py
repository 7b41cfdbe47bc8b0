"""`make ladder-diff`: a stage against its parent."""

import re
import shutil
import subprocess
import sys

import ladder_diff
import pytest

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")


def run(*arguments, **more):
    command = [sys.executable, ladder_diff.__file__, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **more)


@needs_git
@pytest.mark.parametrize("number", [n for n, parent in ladder_diff.PARENT.items() if parent])
def test_a_stage_is_shown_against_its_parent(number, tmp_path):
    """From any folder, plain where the output is no terminal, with success."""
    done = run(number, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    old, new = re.findall(r"^(?:---|\+\+\+) [ab]/(\S+)", done.stdout, re.MULTILINE)
    assert old == ladder_diff.stage_file(ladder_diff.PARENT[number])
    assert new == ladder_diff.stage_file(number)
    assert "\x1b" not in done.stdout
    assert "\n-namespace sgemm::stage" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["42"], "there is no stage '42'; there are 0, 1, 1b, 2, 2b, 3"),
        (["stage77"], "there is no stage '77'; there are 0, 1, 1b"),
        ([], "name a stage; there are 0, 1, 1b, 2"),
        (["0"], "stage 0 has no parent: the ladder begins there"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(arguments, text, capsys):
    with pytest.raises(SystemExit) as exit:
        ladder_diff.main(arguments)
    assert exit.value.code == 2
    assert text in capsys.readouterr().err.strip().split("\n")[-1]


@needs_git
@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_needs_neither_a_build_nor_torch(tmp_path):
    """With a Python that has nothing installed."""
    command = ["make", "-s", "-C", str(ladder_diff.ROOT), "ladder-diff"]
    plain = [f"BASE_PYTHON={sys.executable} -I -S", f"PYTHON={tmp_path}/nowhere"]
    done = subprocess.run([*command, "N=2", *plain], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "+++ b/csrc/stages/stage02_shared_tile.cu" in done.stdout
    done = subprocess.run([*command, *plain], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "name a stage; there are 0, 1, 1b" in done.stderr
