"""What an agent does where a restoring rank needs holders that it was not told of."""

from __future__ import annotations

from dataclasses import replace

from support.builders import endpoint
from support.lives import WELCOME, assign, from_rank, live, running, sent
from surefoot.agent import agent_state as on
from surefoot.agent.coordinator_requests import AWAY_SECONDS, epoch_in_charge
from surefoot.ipc.trainer_messages import AllHolders, FindHolders
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.messages import FromAgent, Holders, HoldersWanted, Stop

SOME, ALL = (endpoint("n0"),), (endpoint("n0"), endpoint("n1"))
PART = replace(assign(1, store="h:1"), holders=SOME, partial=True)
WHOLE = Holders(1, ALL, (), 2)


def told(said: tuple[on.Command, ...]) -> list[on.SendToTrainers]:
    return [command for command in said if isinstance(command, on.SendToTrainers)]


def test_a_rank_of_an_agent_that_knows_all_holders_is_told_at_once() -> None:
    life, _ = live(WHOLE, life=running())
    _, said = live(from_rank(1, 0, FindHolders()), life=life)
    assert (told(said), sent(said)) == ([on.SendToTrainers(AllHolders(ALL), 0)], [])


def test_a_rank_that_seeks_is_told_when_the_coordinator_has_told_of_all() -> None:
    life, said = live(PART, from_rank(1, 0, FindHolders()), from_rank(1, 1, FindHolders()), life=running())
    assert told(said) == []
    assert sent(said) == [HoldersWanted(1), HoldersWanted(1)]
    life, said = live(Holders(1, SOME, (), 2, partial=True), life=life)
    assert told(said) == []
    life, said = live(WHOLE, life=life)
    assert told(said) == [on.SendToTrainers(AllHolders(ALL), 0), on.SendToTrainers(AllHolders(ALL), 1)]
    _, said = live(WHOLE, life=life)
    assert told(said) == [], "once"


def test_a_coordinator_that_comes_later_is_asked_too_and_may_answer_with_the_assignment() -> None:
    life, _ = live(PART, from_rank(1, 1, FindHolders()), life=running())
    life, said = live(WELCOME, life=life)
    assert HoldersWanted(1) in sent(said)
    life, said = live(PART, life=life)
    assert told(said) == []
    _, said = live(replace(PART, holders=ALL, partial=False), life=life)
    assert told(said) == [on.SendToTrainers(AllHolders(ALL), 1)]


def test_who_seeks_in_an_epoch_that_is_over_is_told_nothing() -> None:
    life, _ = live(PART, from_rank(1, 0, FindHolders()), Stop(2, ""), life=running())
    _, said = live(WELCOME, from_rank(1, 0, FindHolders()), life=life)
    assert not any(isinstance(one, HoldersWanted) for one in sent(said))
    assert told(said) == []


def test_who_knows_some_holders_alone_drops_no_old_saves() -> None:
    life, _ = live(replace(PART, partial=False), life=running())
    assert epoch_in_charge(life, AWAY_SECONDS) is not None
    life, _ = live(PART, life=life)
    assert epoch_in_charge(life, AWAY_SECONDS) is None


def starting(world: int, parent: Checkpoint | None, partial: bool = True) -> list[FromAgent]:
    begun = replace(PART, world=world, parent=parent, lineage=((3, None, 4),), partial=partial)
    _, said = live(on.WarmChanged(True), begun, on.StoreUp(1, "h:1"))
    assert any(isinstance(one, on.StartTrainers) for one in said)
    return [one for one in sent(said) if isinstance(one, HoldersWanted)]


def test_an_agent_asks_while_trainers_begin_that_will_need_all() -> None:
    assert starting(5, Checkpoint(3, 40)) == [HoldersWanted(1)]
    assert starting(5, Checkpoint(3, 40), partial=False) == []
    assert starting(4, Checkpoint(3, 40)) == []
    assert starting(5, None) == []
