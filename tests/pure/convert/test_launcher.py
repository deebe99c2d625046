"""What launchers' command lines say, and scripts without them."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot_operator.convert.job_draft import Launch, read_launch, shell_of, without_launcher
from surefoot_operator.convert.manifest import NotConvertible


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torchrun train.py --lr 1", Launch(("python", "train.py", "--lr", "1"))),
        ("/opt/bin/torchrun --nnodes=2 --nproc_per_node 8 a.py", Launch(("python", "a.py"), "2", "8")),
        ("torchrun --nnodes 1:4 --max-restarts=3 a.py", Launch(("python", "a.py"), "1:4", "", "3")),
        ("python -u -m torch.distributed.run --standalone a.py", Launch(("python", "a.py"), dropped=("--standalone",))),
        ("python3 -m torch.distributed.launch --use_env a.py", Launch(("python", "a.py"), dropped=("--use-env",))),
        ("torchrun -m pkg.train -x", Launch(("python", "-m", "pkg.train", "-x"))),
        ("torchrun --no-python /bin/train --fast", Launch(("/bin/train", "--fast"))),
        ("hyperpodrun --tee=3 --log_dir /tmp a.py", Launch(("python", "a.py"), dropped=("--tee", "--log-dir"))),
        ("torchrun --nproc_per_node=auto a.py --nnodes 9", Launch(("python", "a.py", "--nnodes", "9"), "", "auto")),
    ],
)
def test_a_launchers_options_are_told_apart_from_the_programs(line: str, said: Launch) -> None:
    assert read_launch(line.split()) == said


@pytest.mark.parametrize(
    "line", ["", "python train.py", "python -m pkg.train", "python -c 1 -m torch.distributed.run", "bash torchrun.sh"]
)
def test_other_commands_start_no_launcher(line: str) -> None:
    assert read_launch(line.split()) is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torchrun --nnodes 2", "starts no program"),
        ("torchrun --nnodes", "no option --nnodes"),
        ("torchrun --colour red a.py", "no option --colour"),
        ("accelerate launch a.py", "`accelerate` starts the ranks"),
        ("/usr/bin/deepspeed a.py", "`deepspeed` starts the ranks"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(line: str, said: str) -> None:
    with pytest.raises(NotConvertible, match=said):
        read_launch(line.split())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("torchrun --nproc_per_node=2 a.py --x $X\n", "exec python a.py --x $X\n"),
        ("torchrun \\\n  --nnodes=2 \\\n  a.py --text 'a  b'", "exec python a.py --text 'a  b'"),
        ("set -e; pip install -q x && torchrun a.py", "set -e; pip install -q x && exec python a.py"),
        ("echo torchrun\ntorchrun a.py\necho done", "echo torchrun\npython a.py\necho done"),
        ("exec torchrun a.py", "exec python a.py"),
        ("A=1 torchrun a.py", "export A=1; exec python a.py"),
        ("A=1 torchrun a.py; ls", "A=1 python a.py; ls"),
        ("# torchrun is next\ntorchrun a.py 2>&1 | tee log", "# torchrun is next\npython a.py 2>&1 | tee log"),
        ("time torchrun a.py", "time python a.py"),
        ('torchrun a.py "$(date; ls)" `date`', 'exec python a.py "$(date; ls)" `date`'),
    ],
)
def test_only_the_launcher_goes_out_of_a_script(before: str, after: str) -> None:
    assert without_launcher(before).text == after


def test_a_script_tells_what_it_sets() -> None:
    found = without_launcher("export N=8\nM='2'\ntorchrun --nproc_per_node=$N --nnodes=${M} a.py")
    assert found.variables == {"N": "8", "M": "2"}
    assert found.launch is not None
    assert (found.launch.ranks, found.launch.nodes) == ("$N", "${M}")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("torchrun a.py && torchrun b.py", "more than once"),
        ("cat <<E\nE\ntorchrun a.py", "here-document"),
        ("torchrun 'a.py", "not understood"),
    ],
)
def test_a_script_that_is_not_understood_is_refused(script: str, said: str) -> None:
    with pytest.raises(NotConvertible, match=said):
        without_launcher(script)


@given(st.text(alphabet="ab \t\n;&|\\'\"`$(){}#<>=-", max_size=60))
def test_a_script_without_a_launcher_stays_as_it_is(script: str) -> None:
    try:
        assert without_launcher(script).text == script
    except NotConvertible as refused:
        assert "\n" not in str(refused)  # noqa: PT017  # either is right


@given(
    st.lists(st.sampled_from(["A=1", "export B='x y'", "true", "echo 'a;b' \"c&d\"", "# note", ""]), max_size=4),
    st.lists(st.sampled_from(["--x", "'a b'", '"$A"', "\\;", "$(echo q)", "c=d"]), max_size=4),
)
def test_the_rewritten_script_gives_the_program_the_words_that_the_launcher_would_have(
    before: list[str], words: list[str]
) -> None:
    """Judged by a shell: both scripts print the words of their last command."""
    show = "python() { shift; printf '%s\\n' \"$@\"; }; torchrun() { shift 2; printf '%s\\n' \"$@\"; }\n"
    given = "\n".join([*before, "torchrun --nnodes=2 a.py " + " ".join(words)])
    rewritten = without_launcher(given).text.replace("exec python", "python")
    told = [
        subprocess.run(["sh", "-c", show + text], capture_output=True, text=True, check=True).stdout
        for text in (given, rewritten)
    ]
    assert told[0] == told[1]


def test_a_shells_script_is_found_behind_its_options() -> None:
    assert shell_of(["/bin/bash", "-x", "-ec", "script", "name"]) == 3
    assert shell_of(["bash", "script.sh"]) is None
    assert shell_of(["python", "-c", "1"]) is None
