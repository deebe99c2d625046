"""`surefoot local` with a node that freezes longer than anybody waits, and wakes with an old epoch in its hands."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.local_run import SECONDS, Job, LocalRun, assert_equal, assert_whole, faults, running
from surefoot.protocol.checkpoints.completeness import is_on_lineage
from surefoot.protocol.identities import RankSave

FROZEN = "node-1"


@dataclass
class Watch:
    """Looks at every holder again and again: what a sealed one holds that no present epoch descends from."""

    run: LocalRun
    stale: dict[str, set[RankSave]] = field(default_factory=dict)
    """By holder: stale saves when it was first seen under a fence, which may only become fewer. An epoch's end finds
    some: ranks that were quicker than the one that died."""
    fences: dict[str, set[int]] = field(default_factory=dict)

    def look(self) -> None:
        lineage = self.run.progress.lineage
        if not lineage:
            return
        newest = lineage[-1].generation
        for holder in self.run.holders():
            index = self.run.index_of(holder)
            if index is None or index.fence < newest:
                continue
            place = f"{holder.node}:{holder.port} under fence {index.fence}"
            self.fences.setdefault(holder.node, set()).add(index.fence)
            held = {m.save for m in index.manifests if m.save.generation < newest}
            stale = {save for save in held if not is_on_lineage(lineage, save.checkpoint, newest)}
            known = self.stale.setdefault(place, stale)
            assert stale <= known, f"{place} took {sorted(stale - known)} although their epoch had ended"
            self.stale[place] = stale


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_node_that_wakes_up_with_an_old_epoch_writes_nothing_that_is_ever_read(tmp_path: Path) -> None:
    job = Job(steps=150, workers=3, elastic=(2, 3), gates=(55,))
    with running(tmp_path, job, *faults(f"freeze:{FROZEN}@step=30,for=6"), "--compare") as run:
        watch = Watch(run)

        def shrunk() -> int:
            """The epoch without the frozen node; 0 before. On a slow machine the first world is one of two, too."""
            of_three = [entry.generation for entry in run.progress.lineage if entry.world_size == 3]
            return next((e.generation for e in run.progress.lineage if of_three and e.generation > of_three[0]), 0)

        def is_awake() -> bool:
            watch.look()
            return shrunk() > 0 and shrunk() in watch.fences.get(FROZEN, set())

        def has_grown_again() -> bool:
            watch.look()
            return [entry.world_size for entry in run.progress.lineage][-3:] == [3, 2, 3]

        run.wait("the thawed node's holder under the new epoch's fence", is_awake)
        epoch = shrunk()
        run.wait("the end of the old epoch's trainers", lambda: set(run.epochs_of_trainers()) == {epoch})
        assert f"generation {epoch} is claimed" in run.agent_log(1)
        run.open_gate(55)
        run.wait("the world with the thawed node", has_grown_again)
        run.wait_for_step(120)
        watch.look()
        done = run.finish()
    assert_whole(done.report, 150)
    assert_equal(done.report)
    assert {entry.parent.step for entry in run.progress.lineage if entry.generation == epoch and entry.parent} <= {
        25,
        26,
        30,
    }
    frozen = next(i for i in done.report["incidents"] if i["fault"])
    assert (frozen["node"], frozen["world_size_before"], frozen["world_size_after"]) == (FROZEN, 3, 2)
