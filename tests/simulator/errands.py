"""What an agent does for the leader beside its trainers: it lists and tidies the persistent tier, copies, uploads."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from simulator.engine import Refusal, Unavailable
from simulator.tiers import CHUNKS, Holder, Persistent, Piece
from surefoot.protocol import messages as said
from surefoot.protocol.checkpoints.completeness import UnreadRecord
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.protocol.messages import ListAllServers

if TYPE_CHECKING:
    from simulator.agents import Agent


class Errands:
    """Of one agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._promoting: set[RankSave] = set()

    def upload(self, saves: tuple[RankSave, ...]) -> None:
        """Those that are not on their way already."""
        for save in saves:
            if save not in self._promoting:
                self._promoting.add(save)
                self._agent.engine.after(0.5, self._agent.process, self._promote, save)

    def tell_layouts(self, request: int, wanted: tuple[str, ...]) -> None:
        """The layout records that were asked for, and what cannot be read of them."""
        tier = self._agent.simulation.persistent

        def done(answer: Any) -> None:
            if isinstance(answer, Unavailable | Refusal):
                self._agent.say(said.PersistentPage(request, error=str(answer)))
                return
            left = tuple(one for one in answer if one is not None)
            found = {digest for digest, one in zip(wanted, answer, strict=True) if one is None}
            self._agent.say(said.PersistentPage(request, layouts=dict.fromkeys(sorted(found), ""), unread_records=left))

        if tier is not None:
            read = partial(_layouts, tier, wanted)
            self._agent.network.call(self._agent.process, tier.process, read, done, 2.0)

    def tell_listing(self, asked: said.ListPersistent) -> None:
        tier, request = self._agent.simulation.persistent, asked.request

        def done(answer: Any) -> None:
            if isinstance(answer, Unavailable | Refusal):
                self._agent.say(said.PersistentPage(request, error=str(answer)))
            else:
                (found, left), newest = answer
                texts = tuple(m.to_json() for m in found)
                self._agent.say(said.PersistentPage(request, texts, unread_records=left, newest_generation=newest))

        def listed() -> Any:
            assert tier is not None
            self._agent.simulation.oracle.eyes.served.setdefault(request, self._agent.engine.now)
            newest = tier.newest_epoch(asked.claim_generation, asked.claim_ticket)
            return tier.listing(), newest

        if tier is None:
            self._agent.say(said.PersistentPage(request, error="there is no persistent tier"))
        else:
            self._agent.engine.after(
                tier.slow(),
                self._agent.process,
                self._agent.network.call,
                self._agent.process,
                tier.process,
                listed,
                done,
                2.0,
            )

    def _fetch(self, save: RankSave, sources: list[Holder], done: Any, silent: int = 0, bad: int = 0) -> None:
        """A good copy of a rank save: (entry, pieces), or whether every copy that there is answered and is bad."""
        if not sources:
            done(bad > 0 and not silent)
            return
        source = sources[0]

        def answered(answer: Any) -> None:
            told = isinstance(answer, tuple)
            there = told and answer[1] is not None
            if there and len(answer[1]) == CHUNKS and not any(p.damaged for p in answer[1]):
                done(answer)
            else:
                self._fetch(save, sources[1:], done, silent + (not told), bad + there)

        self._agent.network.call(
            self._agent.process, source.process, lambda: (source.index.get(save), source.get(save)), answered
        )

    def repair(self, order: said.RepairSave) -> None:
        told = {one.instance for one in (*order.endpoints, *self._agent.endpoints)}
        source, target = (self._agent.holder(h) if h in told else None for h in (order.source, order.target))

        def reply(error: str | None) -> None:
            self._agent.say(said.RepairReply(order.request, error))

        def write(part: int, entry: Any, pieces: tuple[Piece, ...]) -> None:
            assert target is not None
            if part == len(pieces):
                operation: Any = lambda: target.commit(entry, order.generation)  # noqa: E731
            else:
                operation = lambda: target.put(order.save, pieces[part])  # noqa: E731

            def done(answer: Any) -> None:
                if isinstance(answer, Unavailable | Refusal):
                    reply(str(answer))
                elif part == len(pieces):
                    reply(None)
                else:
                    write(part + 1, entry, pieces)

            self._agent.network.call(self._agent.process, target.process, operation, done)

        if source is None or target is None:
            reply("gone")
            return
        self._fetch(order.save, [source], lambda got: reply("unreadable") if isinstance(got, bool) else write(0, *got))

    def _promote(self, save: RankSave) -> None:
        tier = self._agent.simulation.persistent
        if tier is None:
            return

        def uploaded(answer: Any) -> None:
            error = str(answer) if isinstance(answer, Unavailable | Refusal) else None
            self._promoting.discard(save)
            self._agent.say(said.UploadReply(save, error, 1000, 0.1))

        lacking = self._agent.partly_told

        def fetched(got: Any) -> None:
            if isinstance(got, bool):
                self._promoting.discard(save)
                if lacking:
                    self._agent.say(ListAllServers(lacking))
                self._agent.say(said.UploadReply(save, "no copy can be read", unreadable=got and not lacking))
                return
            entry, pieces = got

            def chunks_done(answer: Any) -> None:
                if isinstance(answer, Unavailable | Refusal):
                    uploaded(answer)
                else:
                    self._agent.network.call(
                        self._agent.process, tier.process, lambda: tier.commit(entry), uploaded, 2.0
                    )

            slow = self._agent.engine.rng.uniform(0.05, 0.5) if tier.slow_put is None else tier.slow_put()
            self._agent.engine.after(
                slow, self._agent.process, self._agent.network.call, self._agent.process, tier.process,
                lambda: tier.put(entry, pieces), chunks_done, 2.0,
            )  # fmt: skip

        sources = [h for e in self._agent.endpoints if (h := self._agent.holder(e.instance)) is not None]
        self._fetch(save, sources, fetched)

    def drop_persistent(self, request: int, checkpoints: tuple[Checkpoint, ...]) -> None:
        tier = self._agent.simulation.persistent
        if tier is None or not checkpoints:
            self._agent.say(said.DeleteReply(request))
            return

        def done(answer: Any) -> None:
            if isinstance(answer, Unavailable | Refusal):
                self._agent.say(said.DeleteReply(request, str(answer)))
            else:
                self.drop_persistent(request, checkpoints[1:])

        def delete() -> None:
            self._agent.network.call(self._agent.process, tier.process, lambda: tier.delete(checkpoints[0]), done, 2.0)

        if tier.slow_put is None:
            delete()
        else:  # a store that takes its time about uploads does about deletions
            self._agent.engine.after(tier.slow_put(), self._agent.process, delete)


def _layouts(tier: Persistent, wanted: tuple[str, ...]) -> list[UnreadRecord | None]:
    return [tier.layout(digest) for digest in wanted]
