"""Every schedule of a small job, to the end: an explicit-state search over the protocol with the project's pure rules.

No time here: whatever could happen next is tried. Old worlds go on as long as they like, messages wait as long as they
like, leaders overlap. Completeness, lineage, watermark, retention and the choice of the restore point are the
project's own functions; holders follow `simulator.tiers` in bits: each rank save of the scope is one bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from simulator.scopes import AWAY, NOBODY, SCOPES, UNREAD, UP, Drop, Found, Rulebook, Scope, Side, State, swapped
from surefoot.protocol.checkpoints.completeness import effective_replicas


class Search:
    """One scope. `run` counts states, or raises Found with the shortest way to a violation."""

    def __init__(self, scope: Scope) -> None:
        self.scope, self.book = scope, Rulebook(scope)
        self.saves, self.bit, self.mask = self.book.saves, self.book.bit, self.book.mask
        self.masks, self.names, self.on = self.book.masks, self.book.names, self.book.on

    # ---- the search -------------------------------------------------------------------------------------------------

    def start(self) -> State:
        side = Side(1, UP, 1, 0, 0, 0, UNREAD, False, 1)
        steps = (0, *([UNREAD] * (self.scope.epochs - 1)))
        tier = 0 if self.scope.persistent else UNREAD
        return State(
            1, False, ((1, None),), steps, (side,) * self.scope.holders, tier, UNREAD, None, False, frozenset(),
            frozenset(), None, self.scope.faults,
        )  # fmt: skip

    def run(self, most_seconds: float = 1e9) -> int:
        """Breadth first, so that what is found is found in the fewest steps. States seen are kept as 64-bit hashes."""
        first = self.start()
        seen = {hash(first)}
        level, began = [first], time.monotonic()
        while level:
            following: list[State] = []
            for state in level:
                for label, moved in self.moves(state):
                    if isinstance(moved, str):
                        raise Found(self._way(f"{label}: {moved}", state))
                    after = self.canonical(moved)
                    if (name := hash(after)) not in seen:
                        seen.add(name)
                        following.append(after)
            level = following
            if time.monotonic() - began > most_seconds:
                raise TimeoutError(f"{self.scope.name}: {len(seen)} states in {most_seconds:.0f} s, not at the end")
        return len(seen)

    def canonical(self, state: State) -> State:
        """Holders are alike, and so are ranks: of states that mirror each other only one is searched."""
        if self.scope.ranks == 2:
            straight = (tuple(s.index for s in state.sides), tuple(s.pending for s in state.sides))
            crossed = tuple(tuple(map(swapped, masks)) for masks in straight)
            if crossed < straight:
                state = self._ranks_swapped(state)
        if self.scope.holders == 2 and state.sides[1] < state.sides[0]:
            drops = frozenset(d._replace(side=1 - d.side) for d in state.drops)
            state = state._replace(sides=(state.sides[1], state.sides[0]), drops=drops)
        return state

    def _ranks_swapped(self, state: State) -> State:
        """Rank 0 for rank 1: neighbouring bits change places."""
        sides = tuple(
            s._replace(index=swapped(s.index), lost=swapped(s.lost), pending=swapped(s.pending), read=swapped(s.read))
            for s in state.sides
        )
        drops = frozenset(d._replace(saves=swapped(d.saves)) for d in state.drops)
        return state._replace(
            sides=sides, drops=drops, persistent=swapped(state.persistent), listed=swapped(state.listed)
        )

    def _way(self, last: str, goal: State) -> str:
        """Searches again, up to `goal`, this time remembering the way: only done once something was found."""
        first = self.start()
        came: dict[State, tuple[State, str] | None] = {first: None}
        level = [first]
        while goal not in came:
            following = []
            for state in level:
                for label, moved in self.moves(state):
                    if not isinstance(moved, str) and (after := self.canonical(moved)) not in came:
                        came[after] = (state, label)
                        following.append(after)
            level = following
        labels, step = [last], came[goal]
        while step is not None:
            labels.append(step[1])
            step = came[step[0]]
        return "\n".join(reversed(labels))

    def moves(self, state: State) -> Iterator[tuple[str, State | str]]:
        yield from self._worlds(state)
        yield from self._sides(state)
        yield from self._leader(state)
        yield from returns(self, state)
        if state.drops:
            yield from self._dropping(state)
        if state.persistent != UNREAD:
            yield from self._promoting(state)
        if state.faults:
            yield from self._faults(state)

    # ---- what each party can do -------------------------------------------------------------------------------------

    def _parent(self, state: State, epoch: int) -> tuple[int, int] | None:
        return next(p for e, p in state.lineage if e == epoch)

    def _worlds(self, state: State) -> Iterator[tuple[str, State | str]]:
        """Any committed world, however old, restores and steps; nothing stops it but its end."""
        for epoch, parent in state.lineage:
            step = state.steps[epoch - 1]
            if step == UNREAD:
                if epoch == state.lineage[-1][0]:
                    yield from self._restore(state, epoch, parent)
                continue
            if step >= self.scope.steps:
                continue
            bits = self.mask((epoch, step + 1))
            sides = tuple(s._replace(pending=s.pending | bits) if s.named <= epoch else s for s in state.sides)
            steps = (*state.steps[: epoch - 1], step + 1, *state.steps[epoch:])
            yield f"world {epoch} does step {step + 1}", state._replace(steps=steps, sides=sides)

    def _restore(self, state: State, epoch: int, parent: tuple[int, int] | None) -> Iterator[tuple[str, State | str]]:
        if parent is not None:
            there = 0 if state.persistent == UNREAD else state.persistent
            for side in state.sides:
                there |= side.index if side.away == UP else 0
            if self.mask(parent) & ~there:
                return  # silent or absent: waited for, or a new epoch is claimed
        steps = (*state.steps[: epoch - 1], parent[1] if parent else 0, *state.steps[epoch:])
        yield f"world {epoch} restores {parent}", state._replace(steps=steps)

    def _put(self, state: State, index: int, side: Side) -> State:
        return state._replace(sides=(*state.sides[:index], side, *state.sides[index + 1 :]))

    def _sides(self, state: State) -> Iterator[tuple[str, State | str]]:
        """A drain's commit arrives. An old world reaches holders that the leader does not."""
        for index, side in enumerate(state.sides):
            pending = side.pending
            while pending:
                bit = pending & -pending
                pending ^= bit
                save = self.saves[bit.bit_length() - 1]
                left = side._replace(pending=side.pending ^ bit)
                if save.generation < side.fence and "fence in commit" not in self.scope.off:
                    refused = save.generation  # its agent stops writing this epoch here
                    rest = 0
                    for i, other in enumerate(self.saves):
                        if side.pending >> i & 1 and other.generation != refused:
                            rest |= 1 << i
                    yield (
                        f"holder {index} refuses epoch {refused}",
                        self._put(state, index, side._replace(pending=rest)),
                    )
                    continue
                taken = left._replace(index=left.index | bit, fence=max(left.fence, save.generation))
                yield f"holder {index} commits {save}", self._recorded(self._put(state, index, taken))

    def _recorded(self, state: State) -> State:
        if state.recorded:
            return state
        base, _ = state.lineage[-1]
        masks = tuple((i, s.index) for i, s in enumerate(state.sides) if s.away == UP)
        full = self.book.water(masks, state.lineage, base, self._copies(state))
        return state._replace(recorded=True) if full is not None else state

    def _copies(self, state: State) -> int:
        if "W from R_eff" in self.scope.off:
            return 1
        return effective_replicas(self.scope.replicas, sum(s.away == UP for s in state.sides))

    def _leader(self, state: State) -> Iterator[tuple[str, State | str]]:
        if state.claimed:
            yield from self._claimed(state)
            return
        if state.epoch < self.scope.epochs:
            sides = tuple(s._replace(read=UNREAD) for s in state.sides)
            after = state._replace(
                epoch=state.epoch + 1, claimed=True, sides=sides, listed=UNREAD, proposals=frozenset()
            )
            yield f"epoch {state.epoch + 1} is claimed", after
        for index, side in enumerate(state.sides):
            if side.away == UP and side.fence < state.epoch:
                ready = side._replace(fence=state.epoch, named=min(side.named, state.epoch))
                yield f"holder {index} is provisioned", self._put(state, index, ready)
        yield from self._upkeep(state)

    def _claimed(self, state: State) -> Iterator[tuple[str, State | str]]:
        for index, side in enumerate(state.sides):
            if side.away == UP and side.read == UNREAD:
                fence = side.fence if "seal" in self.scope.off else max(side.fence, state.epoch)
                read = side._replace(fence=fence, read=side.index, given_up=False)
                after = self._put(state, index, read)
                if "list after read" not in self.scope.off:
                    after = after._replace(listed=UNREAD)
                yield f"holder {index} is sealed at {state.epoch} and read", after
            if side.away == AWAY and not side.given_up:
                yield f"holder {index} is given up", self._put(state, index, side._replace(given_up=True))
        if state.persistent != UNREAD and state.listed == UNREAD:
            yield "the persistent tier is listed", state._replace(listed=state.persistent)
        unread = [s for s in state.sides if s.read == UNREAD and not (s.away == AWAY and s.given_up)]
        if "read all" in self.scope.off:
            unread = unread if len(unread) == len(state.sides) else []
        if not unread and (state.persistent == UNREAD or state.listed != UNREAD):
            reads = tuple(s.read for s in state.sides)
            decided = (
                self.book.choose(reads, state.listed, state.lineage, state.floor),
                UNREAD not in reads or "read all" in self.scope.off,
            )
            if decided not in state.proposals:
                after = state._replace(proposals=state.proposals | {decided})
                yield f"a leader decides for {decided[0]}", after
        for parent, informed in state.proposals:
            yield f"epoch {state.epoch} is committed from {parent}", self._commit(state, parent, informed)

    def _commit(self, state: State, parent: tuple[int, int] | None, informed: bool) -> State | str:
        base = state.lineage[-1][0]
        if parent is not None and not self.on(state.lineage, parent, base):
            return "the parent is not on the lineage"
        if state.floor is not None and (parent is None or parent[1] < state.floor[1]):
            return "the parent lies below the floor"
        problem = self._overlooked(state, parent) if informed else None
        if problem is not None:
            return problem
        sides = tuple(
            s._replace(read=UNREAD, named=s.named if s.read == UNREAD else min(s.named, state.epoch))
            for s in state.sides
        )
        lineage = (*state.lineage, (state.epoch, parent))
        safe = state.safe if state.safe is not None and self.on(lineage, state.safe, state.epoch) else None
        return state._replace(
            claimed=False, lineage=lineage, sides=sides, listed=UNREAD, proposals=frozenset(), safe=safe
        )

    def _overlooked(self, state: State, parent: tuple[int, int] | None) -> str | None:
        """Faults aside, nothing that was Full or durable when the claim began to read may be left behind."""
        base = state.lineage[-1][0]
        for epoch, _ in state.lineage:
            for step in range((parent[1] if parent else 0) + 1, self.scope.steps + 1):
                if not self.on(state.lineage, (epoch, step), base):
                    continue
                wanted = self.mask((epoch, step))
                everywhere = [s for s in state.sides if s.away == UP and s.fence >= state.epoch]
                if len(everywhere) == len(state.sides) and all(s.index & wanted == wanted for s in everywhere):
                    return f"step {step} of epoch {epoch} is on every holder, and was not chosen"
                if state.persistent != UNREAD and state.persistent & wanted == wanted:
                    return f"step {step} of epoch {epoch} is in the persistent tier, and was not chosen"
        return None

    # ---- deleting ---------------------------------------------------------------------------------------------------

    def _upkeep(self, state: State) -> Iterator[tuple[str, State | str]]:
        """The leader reads every holder it reaches, and sends what follows to exactly those."""
        fit = [(i, s) for i, s in enumerate(state.sides) if s.away == UP and s.fence >= state.epoch]
        base, parent = state.lineage[-1]
        water = self.book.water(tuple((i, s.index) for i, s in fit), state.lineage, base, self._copies(state))
        found: set[Drop] = set()
        for index, side in fit:
            gone = self.book.gone(side.index, state.lineage, base, water, state.floor)
            if "keep parent" in self.scope.off and parent is not None:
                gone |= side.index & self.mask(parent)
            for mask in self.masks:
                if gone & mask:
                    found.add(Drop(index, side.instance, gone & mask, base))
        fresh = {
            d for d in found if not any(d._replace(saves=o.saves) == o and not d.saves & ~o.saves for o in state.drops)
        }
        if not fresh:
            return
        safe = state.safe
        if water is not None and (safe is None or water.step > safe[1]):
            safe = (water.generation, water.step)
            wanted = effective_replicas(self.scope.replicas, len(fit))
            if not self._enough(state, self.mask(safe), wanted):
                yield "the leader sends drops", f"{water} has fewer than {wanted} copies and counts as the watermark"
                return
        yield f"the leader sends drops, watermark {water}", state._replace(drops=state.drops | fresh, safe=safe)

    def _dropping(self, state: State) -> Iterator[tuple[str, State | str]]:
        for drop in state.drops:
            side = state.sides[drop.side]
            rest = state._replace(drops=state.drops - {drop})
            refused = drop.writer < side.fence and "fence in drop" not in self.scope.off
            gone = drop.saves & side.index
            if side.instance != drop.instance or refused or not gone:
                yield f"holder {drop.side} does not drop {drop.saves:b}", rest
                continue
            if side.away == AWAY and not self.scope.late_drops:
                continue  # its expiry is shorter than the time after which a holder is given up
            label = f"holder {drop.side} drops {', '.join(map(str, self.names(gone)))} (writer {drop.writer})"
            problem = self._unsafe(state, drop.side, gone)
            yield label, problem or self._put(rest, drop.side, side._replace(index=side.index & ~gone))

    def _unsafe(self, state: State, holder: int, gone: int) -> str | None:
        save = self.names(gone)[0]
        base = state.lineage[-1][0]
        if not self.on(state.lineage, (save.generation, save.step), base):
            return None
        everything = max(state.persistent, 0)
        for side in state.sides:
            everything |= side.index | side.lost
        if self.mask((save.generation, save.step)) & ~everything:
            return None  # it never was complete
        elsewhere = max(state.persistent, 0)
        for index, side in enumerate(state.sides):
            elsewhere |= (side.index | side.lost) if index != holder else 0
        if state.sides[holder].fence < base and not gone & ~elsewhere:
            return None  # not sealed for this epoch: its copies count in nothing, and the checkpoint stays whole
        durable = self.book.durable(state.persistent, state.lineage, base) if state.persistent != UNREAD else None
        if durable is not None and durable.step > save.step:
            return None
        if state.safe is not None and state.safe[1] > save.step and not self.mask(state.safe) & ~everything:
            return None
        return "nothing newer on the lineage is safe"

    def _enough(self, state: State, wanted: int, required: int) -> bool:
        return all(
            sum(bool((s.index | s.lost) & self.bit[save]) for s in state.sides) >= required
            for save in self.names(wanted)
        )

    # ---- the persistent tier ----------------------------------------------------------------------------------------

    def _promoting(self, state: State) -> Iterator[tuple[str, State | str]]:
        """Any rank save of a complete checkpoint may be uploaded at any time; the leader may see it complete."""
        there = 0
        for side in state.sides:
            there |= side.index
        missing = there & ~state.persistent
        while missing:
            bit = missing & -missing
            missing ^= bit
            save = self.saves[bit.bit_length() - 1]
            whole = self.mask((save.generation, save.step))
            if whole & ~(there | state.persistent):
                continue
            yield f"{save} is uploaded", state._replace(persistent=state.persistent | bit)
        if not state.claimed:
            newest = self.book.durable(state.persistent, state.lineage, state.lineage[-1][0])
            if newest is not None and (state.floor is None or newest.step > state.floor[1]):
                yield "the floor rises", state._replace(floor=(newest.generation, newest.step), recorded=True)

    # ---- faults -----------------------------------------------------------------------------------------------------

    def _faults(self, state: State) -> Iterator[tuple[str, State | str]]:
        left = state._replace(faults=state.faults - 1)
        for index, side in enumerate(state.sides):
            fresh = Side(side.instance + 1, UP, 0, 0, side.lost | side.index, 0, UNREAD, False, NOBODY)
            yield f"FAULT holder {index} restarts empty", self._put(left, index, fresh)
            if side.away == UP:
                parted = self._put(left, index, side._replace(away=AWAY, read=UNREAD))
                yield f"FAULT holder {index} is out of reach", parted
        for rank in range(self.scope.ranks):
            mine = sum(bit for save, bit in self.bit.items() if save.rank == rank)
            sides = tuple(s._replace(pending=s.pending & ~mine) for s in state.sides)
            if sides != state.sides:
                yield f"FAULT rank {rank}'s agent dies", left._replace(sides=sides)


def returns(search: Search, state: State) -> Iterator[tuple[str, State | str]]:
    """A holder that was out of reach is in reach again; nobody is asked."""
    for index, side in enumerate(state.sides):
        if side.away == AWAY:
            yield f"holder {index} is back", search._put(state, index, side._replace(away=UP))


def explore(say: Callable[[str], None] = print, scopes: tuple[Scope, ...] = SCOPES) -> int:
    """Searches every scope to its end; how many states in all. Raises Found."""
    total = 0
    for scope in scopes:
        began = time.monotonic()
        states = Search(scope).run()
        total += states
        say(f"{scope.name}: {states:,} states, no violation, {time.monotonic() - began:.1f} s")
    return total


def main() -> int:
    """For the command line; 0 if every scope was searched to its end without a violation."""
    try:
        total = explore()
    except Found as found:
        print(f"VIOLATION, by these steps:\n{found}")
        return 1
    print(f"{total:,} states in all")
    return 0
