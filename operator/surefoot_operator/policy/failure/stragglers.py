"""Finds stragglers: ranks that all others wait for.

Pure; called by `plan` and `status_conditions`. A persistently slow rank causes no failure: each step takes longer, on every
rank equally. Without the rank's name, an engineer searches for days.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import pi, sqrt

from surefoot.protocol.progress import RankActivity, add_activities, count_observations_by_line
from surefoot_operator.api.status import Membership, Straggler
from surefoot_operator.job_snapshot import MAX_WINDOWS, ObservedSession
from surefoot_operator.policy.core.facts import (
    MembershipFacts,
    member_sessions,
)

# ---- slow ranks ------------------------------------------------------------------------------------------------------
# Compares how much of their time ranks work, that is, do not wait for others. In synchronous training the slowest rank
# waits least. A tie, uneven shares of the batch or too few observations prove nothing, and no rank is named.

MIN_PEERS = 3
"""Ranks that do the same work: with fewer there is no majority that shows the usual share."""

MIN_SLOWDOWN_RATIO = 1.25
"""Smallest slowdown against its peers at which a rank is named, however steady the peers are."""

MIN_WAIT_SHARE = 0.1
"""Share of a step that all others wait for a rank, from which on it is reported."""

MIN_WINDOW_DEVIATIONS = 1.5
"""Standard deviations, of the peers' differences and of sampling together, by which a rank is an outlier in one window."""

MIN_POOLED_DEVIATIONS = 4.0
"""The same for all windows together; with so many observations chance hardly matters."""

MIN_LINE_SHARE = 0.01
"""Share of its time: a rank that was observed in a line less often does nothing relevant there."""

_MAX_NODE_SLOWDOWN = 10.0
"""Slowdown in a single line that no slow node causes, because a slow node slows every line."""

_DEVIATIONS_PER_MAD = 1.4826
"""Converts a median absolute deviation into a standard deviation, for normal noise (Rousseeuw and Croux, 1993)."""
_MANY_PEERS = 64
"""Number of peers from which on one more or less changes neither their median nor their deviation."""


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that waits far less than the ranks that do the same work."""

    rank: int
    share: float
    """Share of its time in which it works, that is, waits for no other rank (0 to 1)."""
    usual_share: float
    """The share at which its peers would work with as large a part of the batch (0 to 1)."""
    divergent_line: tuple[int, int] | None = None
    """Line of the training loop, and line in the function called there, where most of the extra work is done and where peers
    were not observed. None: the rank executes the same lines as its peers."""

    @property
    def ratio(self) -> float:
        """Slowdown: how many times as long as its peers it works."""
        return self.share / max(self.usual_share, 0.01)


@dataclass(frozen=True, slots=True)
class _PeerBaseline:
    """The usual behaviour of a group of peers."""

    share: float
    """Median share of time in which they work (0 to 1)."""
    variance: float
    """Variance of a further peer's share around it, without the sampling error of that peer's own observations."""
    rate: float
    """Median number of samples per observation."""


def find_slow_ranks(windows: Sequence[Sequence[RankActivity]]) -> tuple[SlowRank, ...]:
    """Finds ranks that are outliers in every window and in all windows together.

    Args:
        windows: Activity of all ranks over about the same steps, per window; the oldest first.
    """
    slow_in_all_windows: set[int] | None = None
    for window in reversed(windows):  # the newest window nearly always has no outlier, which ends the search
        slow_in_window = {slow_rank.rank for slow_rank in find_outlier_ranks(window, MIN_WINDOW_DEVIATIONS)}
        slow_in_all_windows = slow_in_window if slow_in_all_windows is None else slow_in_all_windows & slow_in_window
        if not slow_in_all_windows:
            return ()
    pooled: dict[int, RankActivity] = {}
    for activity in (activity for window in windows for activity in window):
        pooled[activity.rank] = add_activities(pooled[activity.rank], activity) if activity.rank in pooled else activity
    candidates = (
        slow_rank
        for slow_rank in find_outlier_ranks(pooled.values(), MIN_POOLED_DEVIATIONS)
        if slow_rank.rank in (slow_in_all_windows or ())
    )
    return tuple(replace(slow_rank, divergent_line=_divergent_line(slow_rank, pooled)) for slow_rank in candidates)


def _divergent_line(slow: SlowRank, activities: Mapping[int, RankActivity]) -> tuple[int, int] | None:
    """Returns where a rank executes lines that its peers do not, if they explain at least half of its extra work.

    A rank that is merely slow takes longer in the lines that all execute: its peers are observed there too, only less often.
    """
    activity = activities[slow.rank]
    peers = [other for other in activities.values() if other.work == activity.work and other is not activity]
    observations, peer_totals = sum(other.observations for other in peers), count_observations_by_line(peers)
    own_line_shares = {
        line: count / activity.observations
        for line, count in count_observations_by_line((activity,)).items()
        if peer_totals.get(line, 0) / observations
        <= max(MIN_LINE_SHARE, count / activity.observations / _MAX_NODE_SLOWDOWN)
    }
    return (
        max(own_line_shares, key=lambda line: own_line_shares[line])
        if 2 * sum(own_line_shares.values()) > slow.share - slow.usual_share
        else None
    )


def find_outlier_ranks(window: Iterable[RankActivity], deviations: float) -> tuple[SlowRank, ...]:
    """Finds the ranks that are outliers in one window, sorted by rank.

    Returns:
        None of a group in which half or more stand out: then the usual share is unknown.
    """
    groups: dict[int, list[RankActivity]] = {}
    for activity in window:
        groups.setdefault(activity.work, []).append(activity)
    outliers = list[SlowRank]()
    for peers in groups.values():
        slow = _far_above_peers(peers, deviations) if len(peers) >= MIN_PEERS else []
        outliers += slow if 2 * len(slow) < len(peers) else []
    return tuple(sorted(outliers, key=lambda slow_rank: slow_rank.rank))


def _far_above_peers(peers: Sequence[RankActivity], deviations: float) -> list[SlowRank]:
    """Lists the ranks far above the usual share of the others."""
    threshold = statistics.median_low(activity.share for activity in peers) + MIN_WAIT_SHARE
    above = [activity for activity in peers if activity.share > threshold]  # nearly always empty
    shared_baseline = _peer_baseline(peers) if above and len(peers) > _MANY_PEERS else None
    slow_ranks = []
    for activity in above:
        baseline = (
            shared_baseline
            if shared_baseline is not None
            else _peer_baseline([other for other in peers if other is not activity])
        )
        # a rank with the larger part of an uneven batch works longer without being slower
        expected = baseline.share * max(
            1.0, _samples_per_observation(activity) / baseline.rate if baseline.rate else 1.0
        )
        deviation = sqrt(baseline.variance + _sampling_variance(baseline.share, activity.observations))
        if activity.share > expected + max(
            deviations * deviation, MIN_WAIT_SHARE, (MIN_SLOWDOWN_RATIO - 1.0) * expected
        ):
            slow_ranks.append(SlowRank(activity.rank, activity.share, expected))
    return slow_ranks


def _peer_baseline(peers: Sequence[RankActivity]) -> _PeerBaseline:
    """Computes the usual share of the peers, and how far a further peer's may differ from it."""
    share = statistics.median(activity.share for activity in peers)
    spread = _DEVIATIONS_PER_MAD * statistics.median(abs(activity.share - share) for activity in peers)
    observations = statistics.median(activity.observations for activity in peers)
    sampling_variance = _sampling_variance(share, observations)
    # equal ranks differ too, by sampling alone: that part of their spread is no difference between them
    variance_between_ranks = max(0.0, spread**2 - sampling_variance)
    variance_of_median = pi / 2.0 * (variance_between_ranks + sampling_variance) / len(peers)
    return _PeerBaseline(
        share, variance_between_ranks + variance_of_median, statistics.median(map(_samples_per_observation, peers))
    )


def _samples_per_observation(activity: RankActivity) -> float:
    return activity.samples / activity.observations if activity.observations else 0.0


def _sampling_variance(share: float, observations: float) -> float:
    """Returns the variance of a share that is estimated from so many observations; never 0, even if all agree."""
    smoothed_share = (share * observations + 1.0) / (observations + 2.0)
    return smoothed_share * (1.0 - smoothed_share) / max(observations, 1.0)


# ---- stragglers ------------------------------------------------------------------------------------------------------

MAX_STRAGGLERS = 8
"""Number of stragglers reported; of more, the worst."""

_MIN_REPORTED_CHANGE = 0.2
"""Relative change of a slowdown from which on it is reported again, so that small changes cause no writes."""


def update_stragglers(facts: MembershipFacts) -> tuple[Straggler, ...]:
    """Returns the stragglers to report now.

    The reported ones stay unchanged until there are enough observations of every rank of the present membership. A rank
    stays a straggler until it is an outlier in no window.
    """
    # While no generation is committed, nothing new is known.
    membership, reported = facts.status.membership, facts.status.stragglers
    if membership is None or membership.state != "Committed":
        return reported
    reported = tuple(
        straggler
        for straggler in reported
        if membership.world_size >= MIN_PEERS and _is_same_worker(membership, straggler)
    )
    sessions = [s for _, s in member_sessions(facts) if s is not None and s.generation == membership.generation]
    if (
        not sessions
        or len(sessions) < len(membership.members)
        or any(len(s.timings.activity.windows) < MAX_WINDOWS for s in sessions)
    ):
        return reported
    # The newest window alone rules out new stragglers in nearly every call.
    windows = [_collect_window(sessions, MAX_WINDOWS - 1)]
    if not reported and not find_outlier_ranks(windows[0], MIN_WINDOW_DEVIATIONS):
        return reported  # the usual case
    windows = [*(_collect_window(sessions, index) for index in range(MAX_WINDOWS - 1)), *windows]
    slow = [straggler for straggler in find_slow_ranks(windows) if 0 <= straggler.rank < membership.world_size]
    slow = sorted(slow, key=lambda straggler: -straggler.ratio)[:MAX_STRAGGLERS]
    step_seconds = max((s.timings.step_seconds or 0.0 for s in sessions), default=0.0)
    since_step = min(s.timings.activity.windows[0].since_step for s in sessions)
    stragglers_by_rank = {
        straggler.rank: _build_straggler(membership, straggler, step_seconds, since_step, facts.now)
        for straggler in slow
    }
    still_reported = [
        _with_old_numbers(previous, stragglers_by_rank.pop(previous.rank, None))
        for previous in reported
        if _is_still_outlier(previous, stragglers_by_rank, windows)
    ]
    return (*still_reported, *stragglers_by_rank.values())


def _collect_window(sessions: Sequence[ObservedSession], index: int) -> list[RankActivity]:
    return [activity for session in sessions for activity in session.timings.activity.windows[index].activities]


def describe_straggler(straggler: Straggler) -> str:
    """Returns the sentence about a straggler for events and the status."""
    slowdown = f"{straggler.slowdown_ratio:.3g} times as long as its peers"
    wait = f"all others wait {straggler.wait_seconds:.2g} s in each step for it"
    action_clause = f"; {straggler.action}" if straggler.action else ""
    if straggler.divergent_line is not None:
        location = (
            f"in line {straggler.divergent_line} of its training loop"
            if straggler.divergent_line
            else "in several lines of its program"
        )
        location += (
            f" (line {straggler.divergent_callee_line} of the function called there)"
            if straggler.divergent_callee_line
            else ""
        )
        return (
            f"rank {straggler.rank} does more than its peers, since step {straggler.since_step} or before: it works {slowdown},"
            f" most of that {location}, where its peers were not observed, and {wait}. The cause is the program, not node"
            f" {straggler.node}{action_clause}"
        )
    return (
        f"rank {straggler.rank} on worker {straggler.worker} (node {straggler.node}) is persistently slower, since step {straggler.since_step} or"
        f" before: it works {slowdown}, and {wait}{action_clause}"
    )


def group_rank_of(membership: Membership, rank: int) -> int:
    """Returns the index, among the members, of the worker that runs this rank."""
    return rank * len(membership.members) // membership.world_size


def _is_still_outlier(
    reported: Straggler, stragglers_by_rank: dict[int, Straggler], windows: Sequence[Sequence[RankActivity]]
) -> bool:
    """Whether a reported straggler is an outlier in all windows together, or at least in one."""
    if reported.rank in stragglers_by_rank:
        return True
    return any(
        slow_rank.rank == reported.rank
        for window in windows
        for slow_rank in find_outlier_ranks(window, MIN_WINDOW_DEVIATIONS)
    )


def _with_old_numbers(reported: Straggler, current: Straggler | None) -> Straggler:
    """Keeps the reported start and numbers, unless the numbers changed much."""
    if current is None:
        return reported
    if reported.divergent_line is not None:  # a straggler once attributed to the program stays so
        current = replace(
            current, divergent_line=reported.divergent_line, divergent_callee_line=reported.divergent_callee_line
        )
    if (
        current.divergent_line == reported.divergent_line
        and abs(current.slowdown_ratio - reported.slowdown_ratio) <= _MIN_REPORTED_CHANGE * reported.slowdown_ratio
    ):
        return reported
    return replace(
        current, since_step=reported.since_step, since_seconds=reported.since_seconds, action=reported.action
    )


def _build_straggler(
    membership: Membership, slow: SlowRank, step_seconds: float, since_step: int, now_seconds: float
) -> Straggler:
    """Builds the status entry of a slow rank."""
    member = membership.members[group_rank_of(membership, slow.rank)]
    wait_seconds = (slow.share - slow.usual_share) * step_seconds
    return Straggler(
        slow.rank,
        member.index,
        member.node,
        float(f"{slow.ratio:.3g}"),
        float(f"{wait_seconds:.3g}"),
        since_step,
        now_seconds,
        divergent_line=None if slow.divergent_line is None else slow.divergent_line[0],
        divergent_callee_line=0 if slow.divergent_line is None else slow.divergent_line[1],
    )


def _is_same_worker(membership: Membership, straggler: Straggler) -> bool:
    """Whether the rank still runs in the same worker on the same node."""
    if straggler.rank >= membership.world_size:
        return False
    member = membership.members[group_rank_of(membership, straggler.rank)]
    return (member.index, member.node) == (straggler.worker, straggler.node)
