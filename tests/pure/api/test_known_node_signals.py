"""Words of others on nodes: each means one thing, the document has them all, and none that is less than sick moves anybody."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot_operator.api.known_node_signals import IGNORED_REASONS, KNOWN_SIGNALS, SIGNAL_SOURCES, KnownNodeSignal
from surefoot_operator.api.spec import NodeSignals
from surefoot_operator.platforms.kubernetes.views import observations
from surefoot_operator.platforms.kubernetes.views.observations import KubeletLiveness

DOCUMENT = Path(__file__).parents[3] / "docs" / "node-health.md"
WORDS = [word for writer in SIGNAL_SOURCES for word in writer.signals]
MOVES = [word for word in WORDS if word.meaning != "informational"]
IS_SHOWN = [word for word in WORDS if word.meaning == "informational"]


def bearing(*words: KnownNodeSignal, reason: str = "Because") -> dict[str, Any]:
    """A node that is ready, and bears these words."""
    conditions = [{"type": "Ready", "status": "True"}]
    for word in words:
        kind, _, status = word.name.partition("=")
        if word.kind == "condition":
            conditions.append({"type": kind, "status": status, "reason": reason, "message": "it says so"})
    labels = dict(word.name.split("=") for word in words if word.kind == "label")
    return {
        "metadata": {"name": "n0", "uid": "u", "labels": labels},
        "spec": {"taints": [{"key": word.name, "effect": "NoSchedule"} for word in words if word.kind == "taint"]},
        "status": {"conditions": conditions},
    }


def seen(found: dict[str, Any], signals: NodeSignals = KNOWN_SIGNALS) -> tuple[str, str]:
    shown = observations.observe_node(found, KubeletLiveness(), "zone", signals)
    return shown.evacuation_reason, shown.informational


def test_the_document_has_each_word_with_what_it_means() -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").split("| written by | is | kind | marks |\n|---|---|---|---|\n")[1]
    rows = []
    for writer in SIGNAL_SOURCES:
        names_by_meaning: dict[tuple[str, str], list[str]] = {}
        for word in writer.signals:
            names_by_meaning.setdefault((word.meaning, word.kind), []).append(word.name)
        title = f"[{writer.name}]({writer.source})"
        for (meaning, kind), names in names_by_meaning.items():
            rows.append(f"| {title} | {meaning} | {kind} | {', '.join(_without_repeated_keys(names))} |")
            title = ""
    table = "\n".join(rows).replace("|  |", "| |")
    assert lines.partition("\n\n")[0] == table, f"\n{table}"


def _without_repeated_keys(names: list[str]) -> list[str]:
    """Each mark as code; of several values of one label, the key once."""
    shown, last_key = [], ""
    for name in names:
        key, _, value = name.partition("=")
        shown.append(f"`={value}`" if key == last_key else f"`{name}`")
        last_key = key
    return shown


def test_each_word_stands_once_and_every_writer_has_a_source() -> None:
    assert [name for name, often in Counter((w.kind, w.name) for w in WORDS).items() if often > 1] == []
    assert all(writer.source.startswith(("https://", "#")) for writer in SIGNAL_SOURCES)


@pytest.mark.parametrize("word", MOVES, ids=lambda word: word.name)
def test_a_word_that_a_node_ends_or_is_sick_has_it_left(word: KnownNodeSignal) -> None:
    signal, remark = seen(bearing(word))
    assert signal.startswith(f"it has the {word.kind} {word.name}")
    assert ("(Because: it says so)" in signal) == (word.kind == "condition")
    assert remark == ""
    assert seen(bearing(word), NodeSignals()) == ("", "")


@pytest.mark.parametrize("word", IS_SHOWN, ids=lambda word: word.name)
def test_a_word_that_is_less_than_sick_is_shown_and_moves_nobody(word: KnownNodeSignal) -> None:
    signal, remark = seen(bearing(word))
    assert signal == ""
    assert remark.startswith(f"it has the {word.kind} {word.name}")


@given(st.sets(st.sampled_from(IS_SHOWN)))
def test_however_many_of_these_come_together_no_node_is_left_for_them(words: set[KnownNodeSignal]) -> None:
    assert seen(bearing(*words))[0] == ""


@pytest.mark.parametrize("status", ["True", "False", "Unknown"])
@pytest.mark.parametrize("word", [w for w in WORDS if w.kind == "condition"], ids=lambda word: word.name)
def test_a_condition_in_its_other_state_says_that_the_node_is_well(word: KnownNodeSignal, status: str) -> None:
    kind, _, bad = word.name.partition("=")
    if status != bad:
        assert seen(bearing(KnownNodeSignal("condition", f"{kind}={status}", word.meaning))) == ("", "")


@pytest.mark.parametrize(("kind", "reason"), [(kind, r) for kind, reasons in IGNORED_REASONS.items() for r in reasons])
def test_a_monitor_s_own_trouble_is_not_the_node_s_unless_a_job_asks_for_it(kind: str, reason: str) -> None:
    found = bearing(KnownNodeSignal("condition", f"{kind}=False", "unhealthy"), reason=reason)
    assert seen(found)[0] == ""
    assert seen(found, NodeSignals(conditions=(f"{kind}=False",)))[0]
    assert observations.node_plan_fields(found) != observations.node_plan_fields(
        bearing(KnownNodeSignal("condition", f"{kind}=False", "unhealthy"), reason="Other")
    )


@pytest.mark.parametrize("kind", ["MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable"])
def test_what_every_kubelet_says_moves_nobody(kind: str) -> None:
    """A node under pressure evicts pods, and says so on them; the pod that it keeps may stay."""
    assert seen(bearing(KnownNodeSignal("condition", f"{kind}=True", "unhealthy"))) == ("", "")
