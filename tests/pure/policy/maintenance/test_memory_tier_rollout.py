"""When holders may be restarted for a new revision: one failure domain at a time, and no checkpoint at risk."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.builders import running, with_holder
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.status import Incident, JobStatus, Membership
from surefoot_operator.job_snapshot import JobSnapshot
from surefoot_operator.policy.maintenance.maintenance_plan import plan_maintenance
from surefoot_operator.policy.maintenance.memory_tier_rollout import (
    MAX_REPORT_AGE_SECONDS,
    JobSafety,
    MemoryServerPod,
    Rollout,
    judge_job_safety,
    plan_rollout,
    rejected_safety,
)

NOW = 1000.0


def pod(name: str, revision: str = "old", ready: bool = True, **changes: object) -> MemoryServerPod:
    made = MemoryServerPod(name, f"uid-{name}", f"node-{name}", f"domain-{name}", revision, ready)
    return replace(made, **changes)  # type: ignore[arg-type]  # tests name real fields


def job(safe: bool = True, nodes: str | None = "abc", at_seconds: float = NOW) -> JobSafety:
    read = None if nodes is None else Counter(f"node-{name}" for name in nodes)
    return JobSafety("ns/gpt", safe, "of a reason", at_seconds, servers_read_by_node=read)


def decide(*pods: MemoryServerPod, wanted: int | None = None, jobs: tuple[JobSafety, ...] = (job(),)) -> Rollout:
    return plan_rollout(pods, len(pods) if wanted is None else wanted, "new", jobs, NOW)


def names(decided: Rollout) -> list[str]:
    return [pod.name for pod in decided.to_delete]


def test_the_first_domain_goes_first_and_whole() -> None:
    pods = pod("a", domain="z1"), pod("b", domain="z1"), pod("c", domain="z2")
    decided = decide(*pods)
    assert (names(decided), decided.outdated_count) == (["a", "b"], 3)
    assert "2 of 3 memory servers of an older revision, in z1" in decided.reason


def test_nothing_goes_once_all_are_new() -> None:
    decided = decide(pod("a", "new"), pod("b", "new", ready=False))
    assert (decided.to_delete, decided.outdated_count) == ((), 0)


@pytest.mark.parametrize(
    ("pods", "wanted", "jobs", "why"),
    [
        ((pod("a"), pod("b")), 3, (job(),), "1 memory server pods are still missing"),
        ((pod("a"), pod("b", deleting=True)), 2, (job(),), "b is terminating"),
        ((pod("a"), pod("b", "new", ready=False)), 2, (job(),), "b on node-b is not ready"),
        ((pod("a"), pod("b")), 2, (job(safe=False),), "job ns/gpt cannot lose a memory server: of a reason"),
        ((pod("a"), pod("b")), 2, (job(nodes="a"),), "job ns/gpt has not read the memory server on node-b yet"),
        (
            (pod("a", servers=2), pod("b", servers=2)),
            2,
            (job(nodes="aab"),),
            "job ns/gpt has not read every memory server on node-b yet",
        ),
        (
            (pod("a"), pod("b")),
            2,
            (job(at_seconds=NOW - MAX_REPORT_AGE_SECONDS - 1),),
            "job ns/gpt was not reconciled for 16 s",
        ),
        (
            (pod("a", node_ready=False), pod("b", "new")),
            2,
            (job(),),
            "1 memory servers of an older revision are on nodes that",
        ),
    ],
)
def test_what_a_restart_waits_for(
    pods: tuple[MemoryServerPod, ...], wanted: int, jobs: tuple[JobSafety, ...], why: str
) -> None:
    decided = decide(*pods, wanted=wanted, jobs=jobs)
    assert decided.to_delete == ()
    assert decided.reason.startswith(why)


def test_jobs_that_need_no_memory_hold_nothing_up() -> None:
    assert names(decide(pod("a"), jobs=())) == ["a"]
    assert names(decide(pod("a"), jobs=(job(nodes=None, at_seconds=0.0),))) == ["a"]


def test_a_holder_that_never_gets_ready_is_replaced_by_a_revision_that_does() -> None:
    broken = pod("b", "broken", ready=False)
    decided = decide(pod("a"), broken, pod("c", "new"), jobs=(job(nodes="ac"),))
    assert names(decided) == ["b"], "the others wait until it is ready"


def test_a_node_that_is_away_holds_nobody_up() -> None:
    away = pod("a", ready=False, node_ready=False)
    assert names(decide(away, pod("b"), pod("c"), jobs=(job(nodes="bc"),))) == ["b"]


def test_a_job_that_cannot_be_read_is_unsafe_unless_it_never_began() -> None:
    assert rejected_safety(JobStatus(), NOW).is_safe
    assert not rejected_safety(JobStatus(membership=Membership(1, "Committed")), NOW).is_safe
    assert not rejected_safety(None, NOW).is_safe


# ---- a tier under way ---------------------------------------------------------------------------------------------


@dataclass
class Tier:
    """Holders of some domains, a job with two copies that heal with time, and whatever goes wrong meanwhile."""

    pods: list[MemoryServerPod]
    copies: frozenset[str]
    """Nodes that hold the newest checkpoint."""
    read: set[str] = field(default_factory=set)

    def safety(self) -> JobSafety:
        live = {p.node for p in self.pods if p.ready and not p.deleting}
        domains = {p.domain for p in self.pods if p.node in live}
        holding = {p.domain for p in self.pods if p.node in self.copies}
        enough = min(2, len(domains))
        safe = enough == 2 and len(holding) >= enough
        return JobSafety("ns/gpt", safe, "too few copies", NOW, servers_read_by_node=Counter(self.read))

    def possible(self) -> list[tuple[str, int]]:
        """What can happen now."""
        found = [("decided", 0)]
        for place, one in enumerate(self.pods):
            if one.deleting:
                found.append(("restarted", place))
                continue
            found.append(("unready", place) if one.ready else ("ready", place))
            if one.ready and one.node not in self.read:
                found.append(("read", place))
            if one.node in self.read and one.node not in self.copies:
                found.append(("copied", place))
        return found

    def step(self, what: str, place: int) -> None:
        chosen = self.pods[place]
        match what:
            case "restarted":
                fresh = replace(chosen, name=f"{chosen.name}+", revision="new", ready=False, deleting=False)
                self.pods[place] = fresh
            case "ready" | "unready":
                self.pods[place] = replace(chosen, ready=what == "ready")
            case "read":
                self.read.add(chosen.node)
            case "copied":
                self.copies |= {chosen.node}
            case "decided":
                self.decided()

    def decided(self) -> None:
        decided = plan_rollout(self.pods, len(self.pods), "new", (self.safety(),), NOW)
        gone = {pod.name for pod in decided.to_delete}
        assert len({pod.domain for pod in decided.to_delete}) <= 1, "never two domains at once"
        down = {p.domain for p in self.pods if p.deleting}
        assert not (decided.to_delete and down), "never while another one is on its way"
        if any(pod.ready for pod in decided.to_delete):
            assert all(p.ready for p in self.pods), "a holder that serves goes only while all others do"
        for i, one in enumerate(self.pods):
            if one.name in gone:
                self.pods[i] = replace(one, deleting=True, ready=False)
                self.copies -= {one.node}
                self.read -= {one.node}
        assert self.copies, f"the last copy was taken: {decided.reason}"


@pytest.mark.gate_only
@settings(max_examples=300)
@given(st.integers(2, 4), st.integers(1, 2), st.lists(st.integers(0, 1000), max_size=80))
def test_no_order_of_events_takes_two_domains_or_the_last_copy(domains: int, each: int, choices: list[int]) -> None:
    pods = [pod(f"{d}{i}", domain=f"domain-{d}") for d in range(domains) for i in range(each)]
    tier = Tier(pods, frozenset({pods[0].node, pods[-1].node}), {p.node for p in pods})
    for choice in choices:
        possible = tier.possible()
        tier.step(*possible[choice % len(possible)])
    # and left in peace it comes to an end
    for _ in range(100 * len(pods)):
        todo = [one for one in tier.possible() if one[0] not in ("unready", "decided")]
        tier.step(*(todo[0] if todo else ("decided", 0)))
    assert all(p.revision == "new" for p in tier.pods)
    assert tier.copies


# ---- what a job says ----------------------------------------------------------------------------------------------


def said(seen: JobSnapshot) -> JobSafety:
    return judge_job_safety(seen, seen.status, plan_maintenance(seen))


def test_a_job_with_all_its_copies_can_spare_a_holder() -> None:
    seen = running()
    answer = said(seen)
    assert answer.is_safe, answer.reason
    assert answer.servers_read_by_node == {h.endpoint.instance.node: 1 for h in seen.servers}
    assert "2 copies" in answer.reason


def test_a_holder_that_was_not_read_is_not_among_its_nodes() -> None:
    seen = running()
    silent = seen.servers[0].endpoint.instance.node
    answer = said(with_holder(seen, silent, state="Unreachable"))
    assert answer.servers_read_by_node is None or silent not in answer.servers_read_by_node


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"phase": "Complete"}, "it has ended"),
        ({"membership": None, "had_checkpoint": False, "last_complete": None}, "memory has nothing"),
        (
            {
                "membership": Membership(1, "Committed"),
                "last_uploaded": Checkpoint(1, 40),
                "last_complete": Checkpoint(1, 40),
            },
            "not in the persistent tier",
        ),
    ],
)
def test_who_needs_no_memory_is_safe(change: dict[str, Any], why: str) -> None:
    seen = running()
    status = replace(seen.status, **change)
    answer = judge_job_safety(replace(seen, status=status), status, None)
    assert (answer.is_safe, answer.servers_read_by_node) == (True, None)
    assert why in answer.reason


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"membership": Membership(1, "Committed"), "had_checkpoint": True, "last_complete": Checkpoint(1, 40)},
            "in memory only",
        ),
        ({"membership": Membership(2, "Claimed"), "had_checkpoint": True}, "its membership is changing"),
    ],
)
def test_who_could_lose_its_newest_checkpoint_is_not(change: dict[str, Any], why: str) -> None:
    seen = running()
    status = replace(seen.status, **change)
    answer = judge_job_safety(replace(seen, status=status), status, None)
    assert not answer.is_safe
    assert why in answer.reason


def test_one_copy_alone_is_never_restarted_away() -> None:
    seen = running()
    kept = replace(plan_maintenance(seen), replicas=1)
    assert not judge_job_safety(seen, seen.status, kept).is_safe
    status = replace(seen.status, last_uploaded=Checkpoint(1, 30))
    assert judge_job_safety(seen, status, kept).is_safe, "its persistent tier has one"
    assert not judge_job_safety(seen, replace(status, unreadable_checkpoints=(Checkpoint(1, 30),)), kept).is_safe


def test_without_a_checkpoint_at_full_replication_nothing_is_spared() -> None:
    seen = running()
    answer = judge_job_safety(seen, seen.status, replace(plan_maintenance(seen), watermark=None))
    assert (answer.is_safe, answer.reason) == (False, "none of its complete checkpoints has all its copies")


def test_a_recovering_job_spares_nothing() -> None:
    seen = running()
    incident = Incident("trainer-failed", "x", 0, "a", 1, detected_seconds=1.0)
    status = replace(seen.status, incidents=(incident,))
    assert judge_job_safety(seen, status, plan_maintenance(seen)).reason == "it is recovering"
