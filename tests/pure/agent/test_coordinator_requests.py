"""What an agent does where a restoring rank needs holders that it was not told of."""

from __future__ import annotations

from dataclasses import replace

from support.builders import endpoint
from support.lives import WELCOME, assign, from_rank, live, running, sent
from surefoot.agent import agent_state as on
from surefoot.agent.coordinator_requests import DISCONNECTED_SECONDS, generation_to_collect
from surefoot.ipc.trainer_messages import AllServers, RequestAllServers
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.messages import FromAgent, ListAllServers, MemoryServers, StopTrainers

SOME, ALL = (endpoint("n0"),), (endpoint("n0"), endpoint("n1"))
PART = replace(assign(1, store="h:1"), servers=SOME, is_partial=True)
WHOLE = MemoryServers(1, ALL, (), 2)


def told(said: tuple[on.Command, ...]) -> list[on.SendToTrainers]:
    return [command for command in said if isinstance(command, on.SendToTrainers)]


def test_a_rank_of_an_agent_that_knows_all_holders_is_told_at_once() -> None:
    life, _ = live(WHOLE, life=running())
    _, said = live(from_rank(1, 0, RequestAllServers()), life=life)
    assert (told(said), sent(said)) == ([on.SendToTrainers(AllServers(ALL), 0)], [])


def test_a_rank_that_seeks_is_told_when_the_coordinator_has_told_of_all() -> None:
    life, said = live(PART, from_rank(1, 0, RequestAllServers()), from_rank(1, 1, RequestAllServers()), life=running())
    assert told(said) == []
    assert sent(said) == [ListAllServers(1), ListAllServers(1)]
    life, said = live(MemoryServers(1, SOME, (), 2, is_partial=True), life=life)
    assert told(said) == []
    life, said = live(WHOLE, life=life)
    assert told(said) == [on.SendToTrainers(AllServers(ALL), 0), on.SendToTrainers(AllServers(ALL), 1)]
    _, said = live(WHOLE, life=life)
    assert told(said) == [], "once"


def test_a_coordinator_that_comes_later_is_asked_too_and_may_answer_with_the_assignment() -> None:
    life, _ = live(PART, from_rank(1, 1, RequestAllServers()), life=running())
    life, said = live(WELCOME, life=life)
    assert ListAllServers(1) in sent(said)
    life, said = live(PART, life=life)
    assert told(said) == []
    _, said = live(replace(PART, servers=ALL, is_partial=False), life=life)
    assert told(said) == [on.SendToTrainers(AllServers(ALL), 1)]


def test_who_seeks_in_an_epoch_that_is_over_is_told_nothing() -> None:
    life, _ = live(PART, from_rank(1, 0, RequestAllServers()), StopTrainers(2, ""), life=running())
    _, said = live(WELCOME, from_rank(1, 0, RequestAllServers()), life=life)
    assert not any(isinstance(one, ListAllServers) for one in sent(said))
    assert told(said) == []


def test_who_knows_some_holders_alone_drops_no_old_saves() -> None:
    life, _ = live(replace(PART, is_partial=False), life=running())
    assert generation_to_collect(life, DISCONNECTED_SECONDS) is not None
    life, _ = live(PART, life=life)
    assert generation_to_collect(life, DISCONNECTED_SECONDS) is None


def starting(world: int, parent: Checkpoint | None, partial: bool = True) -> list[FromAgent]:
    begun = replace(PART, world_size=world, parent=parent, lineage=((3, None, 4),), is_partial=partial)
    _, said = live(on.WarmChanged(True), begun, on.StoreStarted(1, "h:1"))
    assert any(isinstance(one, on.StartTrainers) for one in said)
    return [one for one in sent(said) if isinstance(one, ListAllServers)]


def test_an_agent_asks_while_trainers_begin_that_will_need_all() -> None:
    assert starting(5, Checkpoint(3, 40)) == [ListAllServers(1)]
    assert starting(5, Checkpoint(3, 40), partial=False) == []
    assert starting(4, Checkpoint(3, 40)) == []
    assert starting(5, None) == []
