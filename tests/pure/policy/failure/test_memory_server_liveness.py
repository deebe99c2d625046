"""An operator that does not reach the holders loses no checkpoint of a job: it waits, and says for what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.builders import BEGAN, endpoint, manifest, running, told, with_holder, with_session
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.spec import CheckpointPolicy, MemoryTierSpec, PersistentTierSpec
from surefoot_operator.api.status import Incident, Membership
from surefoot_operator.job_snapshot import JobSnapshot, ObservedMemoryServer, PersistentListing
from surefoot_operator.policy.core.actions import Plan
from surefoot_operator.policy.core.facts import build_facts
from surefoot_operator.policy.failure.memory_server_liveness import unreachable_servers, usable_servers
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check_plan

NOW = BEGAN + 100
NODES = ("n0", "n1", "n2")
MEMORY = MemoryTierSpec(interval_steps=10)
TIMEOUT = "n0/i0 does not answer while reading the index: timed out"
WRONGPASS = "n0/i0 refuses this account: WRONGPASS invalid username-password pair"


def decided(seen: JobSnapshot) -> Plan:
    made = plan(seen)
    check_plan(made, seen)
    return made


def blind(ago: float = 11.0, floor: int | None = None, trouble: str = TIMEOUT, **policy: object) -> JobSnapshot:
    """Epoch 2 is claimed since `ago`; every holder is silent to the operator, every agent is heard, warm and stopped."""
    persistent = PersistentTierSpec("file:///tmp/checkpoints") if floor is not None else None
    checkpoint = CheckpointPolicy(MEMORY, persistent, **policy)  # type: ignore[arg-type]  # real fields
    seen = running(checkpoint=checkpoint)
    world = seen.status.membership
    assert world is not None
    claim = Membership(2, "Claimed", None, 3, world.members, "a trainer failed", NOW - ago)
    incident = Incident("trainer-failed", "a test", 1, "n1", 1, NOW - ago, NOW - ago, last_step=42, world_size_before=3)
    status = replace(seen.status, membership=claim, phase="Recovering", incidents=(incident,))
    listed = PersistentListing()
    if floor is not None:
        status = replace(status, last_uploaded=Checkpoint(1, floor))
        listed = PersistentListing(2, tuple(manifest(1, floor, r, 3) for r in range(3)), NOW)
    return replace(
        seen,
        status=status,
        sessions=tuple(replace(s, stopped=2) for s in seen.sessions),
        servers=tuple(
            replace(
                h,
                state="Unreachable",
                since_seconds=NOW - ago - 5,
                read_generation=None,
                entries=(),
                last_error=trouble,
            )
            for h in seen.servers
        ),
        persistent=listed,
    )


def going(made: Plan) -> bool:
    """Whether the job waits: neither over nor begun from something older."""
    world = made.status.membership
    return made.status.phase not in ("Failed", "Complete") and world is not None and world.state == "Claimed"


@pytest.mark.parametrize("policy", ["Wait", "Fail", "Restart"])
@pytest.mark.parametrize("ago", [11.0, 100.0, 86400.0])
def test_nothing_is_given_up_while_the_nodes_of_unreachable_holders_are_well(ago: float, policy: str) -> None:
    made = decided(blind(ago, on_total_loss=policy))
    assert going(made)
    assert made.status.lost_servers == ()
    for word in (
        "n0",
        "n1",
        "n2",
        TIMEOUT,
        "allow connections from the operator to the memory tier's port",
        "accept-loss",
    ):
        assert word in made.reason, word


def test_the_job_goes_on_by_itself_once_the_holders_can_be_read() -> None:
    waiting = decided(blind(3600.0))
    read = tuple(replace(h, fence=2, read_generation=2) for h in running().servers)
    world = decided(replace(blind(3600.0), status=waiting.status, servers=read)).status.membership
    assert world is not None
    assert (world.state, world.parent) == ("Committed", Checkpoint(1, 40))


@pytest.mark.parametrize("well", [True, False])
def test_one_unreachable_holder_that_may_have_the_only_copy_is_waited_for_while_its_node_is_well(well: bool) -> None:
    seen = blind(100.0, on_total_loss="Fail")
    seen = with_holder(with_holder(seen, "n0", state="Gone"), "n1", state="Gone")
    if not well:
        nodes = tuple(replace(n, ready=n.ready and n.name != "n2") for n in seen.nodes)
        seen = with_session(
            replace(seen, nodes=nodes), 2, connected=False, since_seconds=NOW - 90, last_message_seconds=NOW - 90
        )
    made = decided(seen)
    assert going(made) == well
    assert ("allow connections from the operator" in made.reason) == well


def test_a_silent_server_is_gone_only_once_another_instance_runs_in_its_own_place() -> None:
    seen = blind(0.1)
    beside = ObservedMemoryServer(endpoint("n0", "i1", server=1), "Ready", NOW)
    assert len(unreachable_servers(build_facts(replace(seen, servers=(*seen.servers, beside))))) == 3
    again = ObservedMemoryServer(endpoint("n0", "i1"), "Ready", NOW)
    left = unreachable_servers(build_facts(replace(seen, servers=(*seen.servers, again))))
    assert [e.instance.node for e in left] == ["n1", "n2"]


@pytest.mark.parametrize("policy", ["Wait", "Fail", "Restart"])
def test_a_holder_that_refuses_the_operator_lives(policy: str) -> None:
    seen = blind(3600, trouble=WRONGPASS, on_total_loss=policy)
    seen = replace(seen, servers=tuple(replace(h, rejects_operator=True) for h in seen.servers))
    made = decided(seen)
    assert going(made)
    assert "WRONGPASS" in made.reason, "a rotated password is told apart from a dead holder"
    assert "password" in made.reason


def test_holders_of_nodes_that_nobody_speaks_for_are_given_up_after_their_time() -> None:
    seen = blind(11.0, floor=20)
    made = decided(replace(seen, sessions=tuple(replace(s, node=f"m{s.index}") for s in seen.sessions)))
    assert made.status.membership is not None
    assert made.status.membership.parent == Checkpoint(1, 20)
    assert len(made.status.lost_servers) == 3


def test_with_something_older_to_go_on_from_a_holder_that_lives_is_waited_for_as_long_as_the_steps_take() -> None:
    """42 steps of which 22 are lost, 2 s each: after 44 s running them again costs no more than waiting on."""
    seen = blind(30.0, floor=20)
    seen = replace(seen, sessions=tuple(told(s, step_seconds=2.0) for s in seen.sessions))
    assert going(decided(seen))
    seen = replace(blind(45.0, floor=20), sessions=seen.sessions)
    made = decided(seen)
    assert made.status.membership is not None
    assert made.status.membership.parent == Checkpoint(1, 20)
    one = with_holder(with_holder(blind(30.0, floor=20), "n0", state="Gone"), "n1", state="Gone")
    assert not going(decided(replace(one, sessions=seen.sessions))), "one of three is likelier dead than unreachable"


def unseen(ago: float = 5.0, trouble: str = TIMEOUT, **changes: object) -> JobSnapshot:
    """A healthy world whose holders are silent to the operator alone."""
    seen = running()
    return replace(
        seen,
        servers=tuple(
            replace(h, state="Unreachable", since_seconds=NOW - ago, last_error=trouble, **changes)  # type: ignore[arg-type]
            for h in seen.servers
        ),
    )


def protection(made: Plan) -> tuple[str, str, str]:
    found = next(c for c in made.status.conditions if c.type == "CheckpointProtected")
    return found.status, found.reason, found.message


def test_that_the_operator_does_not_see_the_holders_is_said_while_the_world_is_well() -> None:
    made = decided(unseen())
    truth, reason, message = protection(made)
    assert (truth, reason) == ("Unknown", "MemoryServersUnreachable")
    assert "3 of 3" in message
    assert TIMEOUT in message
    told = [e for e in made.events if e.reason == "MemoryServersUnreachable"]
    assert len(told) == 1
    assert told[0].warning
    again = decided(replace(unseen(), status=made.status))
    assert not [e for e in again.events if e.reason == "MemoryServersUnreachable"]
    assert protection(decided(unseen(1.0)))[1] != "MemoryServersUnreachable", "a moment is no news"


def test_of_several_servers_the_first_ones_error_is_said_each_time() -> None:
    """A sentence that changed with the order of a set would be written to the status, and recorded, again and again."""
    seen = unseen()
    servers = tuple(replace(h, last_error=f"{h.endpoint.instance.node} is away") for h in seen.servers)
    for order in (servers, servers[::-1]):
        assert "(n0 is away)" in protection(decided(replace(seen, servers=order)))[2]


def usable(seen: JobSnapshot) -> tuple[list[str], bool]:
    found = usable_servers(seen.servers, seen.status.assigned_servers, 1)
    return [endpoint.instance.node for endpoint in found.endpoints], found.are_reachable


def test_an_operator_that_sees_no_holder_takes_none_from_the_agents() -> None:
    seen = unseen()
    assert usable(seen) == (["n0", "n1", "n2"], False)
    one_seen = with_holder(seen, "n1", state="Ready", fence=1)
    assert usable(one_seen) == (["n1"], True), "the others may be as dead as they are silent"
    assert usable(with_holder(seen, "n1", state="Ready", fence=0)) == (["n0", "n2"], False)
    assert usable(with_holder(seen, "n2", state="Gone")) == (["n0", "n1"], False)
    unnamed = replace(seen, status=replace(seen.status, assigned_servers=()))
    assert usable(unnamed) == ([], True), "what nobody would wait for is not saved to"


def test_the_message_says_where_agents_save() -> None:
    assert "agents still save to them" in protection(decided(unseen()))[2]
    assert "agents still save to the others" in protection(decided(with_holder(unseen(), "n1", state="Ready")))[2]


def test_a_dead_minority_and_a_tier_that_died_with_its_nodes_are_no_lost_sight() -> None:
    seen = running()
    assert (
        protection(decided(with_holder(seen, "n1", state="Unreachable", since_seconds=NOW - 5)))[1]
        != "MemoryServersUnreachable"
    )
    gone = replace(unseen(), sessions=tuple(replace(s, node=f"m{s.index}") for s in unseen().sessions))
    assert protection(decided(gone))[1] != "MemoryServersUnreachable", "nobody speaks for these holders"


def test_a_holder_that_another_one_replaced_is_not_waited_for() -> None:
    seen = blind(11.0, floor=20)
    fresh = tuple(replace(h, endpoint=endpoint(h.endpoint.instance.node, "i1"), state="Ready", fence=2, read_generation=2)
                  for h in seen.servers)  # fmt: skip
    made = decided(replace(seen, servers=fresh))
    assert made.status.membership is not None
    assert made.status.membership.parent == Checkpoint(1, 20)
