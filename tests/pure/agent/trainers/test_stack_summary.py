"""Where ranks stand, from what faulthandler wrote."""

from surefoot.agent.trainers.hang_diagnosis import MAX_STACKS_CHARACTERS, Frame, main_thread, summarize_stacks
from surefoot.ipc.stacks import Taken

WAITS = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f00 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3001 in all_reduce
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/train.py", line 40 in main
  File "/home/me/train.py", line 70 in <module>
"""
SLEEPS = """Current thread 0x00007f00 (most recent call first):
  File "/home/me/train.py", line 28 in load
  File "/home/me/train.py", line 39 in main
  File "/home/me/train.py", line 70 in <module>
"""


def test_the_main_thread_is_the_last_one() -> None:
    assert main_thread(WAITS)[0].function == "all_reduce"
    assert main_thread(SLEEPS) == (
        Frame("/home/me/train.py", 28, "load"),
        Frame("/home/me/train.py", 39, "main"),
        Frame("/home/me/train.py", 70, "<module>"),
    )


def test_ranks_that_stand_alike_are_one_group_and_the_smallest_comes_first() -> None:
    told = summarize_stacks([Taken(0, WAITS), Taken(1, WAITS), Taken(2, SLEEPS), Taken(3, WAITS)])
    assert told == (
        "rank 2: in load (me/train.py:28)\n"
        "ranks 0, 1, 3: in all_reduce (distributed/distributed_c10d.py:3001), called by main (me/train.py:40)"
    )


def test_a_rank_without_a_stack_says_why() -> None:
    assert summarize_stacks([Taken(5, "", "its process is stopped")]) == "rank 5: its process is stopped"
    assert summarize_stacks([Taken(5, "nonsense")]) == "rank 5: it runs no Python code"


def test_it_stays_short_whatever_a_program_calls_its_functions() -> None:
    long = 'Current thread 0x1 (most recent call first):\n  File "/a.py", line {} in ' + "f" * 5000 + "\n"
    told = summarize_stacks([Taken(rank, long.format(rank)) for rank in range(1000)])
    assert len(told) <= MAX_STACKS_CHARACTERS
    assert len(summarize_stacks([Taken(rank, SLEEPS) for rank in range(1000)])) < 200
