"""What the chart refuses, and with which words: unknown and wrong values, and a memory limit that cannot hold what Redis may take."""

from __future__ import annotations

import pytest

from chart import helm
from chart.objects import Object
from support.servers.memory_cgroup import container_bytes

REFUSED: dict[str, tuple[Object, str]] = {
    "unknown": ({"operators": {}}, "'operators' not allowed"),
    "unknown below": ({"operator": {"replica": 3}}, "at '/operator': additional properties 'replica' not allowed"),
    "unknown in an image": ({"memoryTier": {"image": {"name": "redis"}}}, "'name' not allowed"),
    "another kind": ({"operator": {"replicas": "two"}}, "at '/operator/replicas': got string, want integer"),
    "too many": ({"operator": {"replicas": 6}}, "at '/operator/replicas': maximum: got 6, want 5"),
    "not of the list": ({"operator": {"logLevel": "LOUD"}}, "'DEBUG', 'INFO', 'WARNING', 'ERROR'"),
    "no log format": ({"logFormat": "xml"}, "at '/logFormat'"),
    "no quantity": ({"memoryTier": {"maxMemory": "4GB"}}, "at '/memoryTier/maxMemory': '4GB' does not match"),
    "no server": ({"memoryTier": {"servers": 0}}, "at '/memoryTier/servers': minimum: got 0, want 1"),
    "too many servers": ({"memoryTier": {"servers": 9}}, "at '/memoryTier/servers': maximum: got 9, want 8"),
    "half a server": ({"memoryTier": {"servers": 1.5}}, "at '/memoryTier/servers': got number, want integer"),
    "servers in words": ({"memoryTier": {"servers": "two"}}, "at '/memoryTier/servers': got string, want integer"),
    "a fraction": ({"memoryTier": {"maxMemory": "1.5Gi"}}, "at '/memoryTier/maxMemory'"),
    "no whole path": ({"memoryTier": {"localSocket": {"hostPath": "run"}}}, "at '/memoryTier/localSocket/hostPath'"),
    "no digest": ({"operator": {"image": {"digest": "latest"}}}, "at '/operator/image/digest'"),
    "no name": ({"fullnameOverride": "Surefoot"}, "at '/fullnameOverride'"),
    "empty command": ({"operator": {"command": []}}, "at '/operator/command': minItems"),
    "no label": ({"memoryTier": {"nodeSelector": {"gpu": True}}}, "got boolean, want string"),
    "no peer": ({"networkPolicy": {"metricsFrom": [{"pods": {}}]}}, "'pods' not allowed"),
}


@pytest.mark.parametrize(("values", "said"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_value_is_refused_with_its_path(values: Object, said: str) -> None:
    with pytest.raises(helm.HelmRefused) as refused:
        helm.text(values)
    assert said in str(refused.value)


MEBI = 1024 * 1024


def memory(values: Object) -> tuple[str, str, str]:
    """maxmemory, and Redis' request and limit."""
    rendered = helm.objects({"memoryTier": values})
    lines = helm.one(rendered, "ConfigMap", "surefoot-memory")["data"]["redis.conf"].splitlines()
    containers = helm.one(rendered, "DaemonSet", "surefoot-memory")["spec"]["template"]["spec"]["containers"]
    resources = next(one for one in containers if one["name"] == "redis")["resources"]
    [maximum] = [line.split()[1] for line in lines if line.startswith("maxmemory ")]
    return maximum, resources["requests"]["memory"], resources["limits"]["memory"]


@pytest.mark.parametrize(
    ("given", "count"),
    [("512Mi", 512 * MEBI), ("2Gi", 2048 * MEBI), ("1G", 10**9), (536870912, 512 * MEBI), ("3Ti", 3 * 1024**4)],
)
def test_the_limit_follows_from_max_memory(given: str | int, count: int) -> None:
    needed = container_bytes(count, 256 * MEBI)
    assert memory({"maxMemory": given}) == (str(count), str(needed), str(needed))


def test_a_limit_that_is_enough_is_kept() -> None:
    given = {"maxMemory": "1Gi", "resources": {"requests": {"memory": "1Gi"}, "limits": {"memory": "1472Mi"}}}
    assert memory(given) == (str(1024 * MEBI), "1Gi", "1472Mi")


def test_a_limit_that_is_too_low_is_refused_with_the_numbers() -> None:
    with pytest.raises(helm.HelmRefused) as refused:
        memory({"maxMemory": "1Gi", "resources": {"limits": {"memory": "1471Mi"}}})
    said = str(refused.value)
    assert "memoryTier.resources.limits.memory is 1471Mi (1542455296 bytes)" in said
    assert "maxMemory 1Gi (1073741824 bytes) needs 1543503872 bytes" in said


def test_a_limit_that_is_too_low_for_a_server_s_part_is_refused_with_the_numbers() -> None:
    """Of a node of 4Gi each of three servers takes 1431655765 bytes."""
    needed = container_bytes(1431655765, 256 * MEBI)
    enough = {"maxMemory": "4Gi", "servers": 3, "resources": {"limits": {"memory": str(needed)}}}
    assert memory(enough)[2] == str(needed)
    with pytest.raises(helm.HelmRefused) as refused:
        memory({**enough, "resources": {"limits": {"memory": str(needed - 1)}}})
    said = str(refused.value)
    assert f"maxMemory 4Gi (1431655765 bytes for each of 3 servers) needs {needed} bytes" in said


def test_the_limit_has_room_for_what_clients_may_take() -> None:
    needed = str(container_bytes(4096 * MEBI, 1024 * MEBI))
    assert memory({"clientMemory": "1Gi"})[1:] == (needed, needed)
    assert memory({"clientMemory": None}) == memory({})  # kept from a release that did not have it
    with pytest.raises(helm.HelmRefused, match="clientMemory is 127Mi, and the longest value on its way needs 128Mi"):
        memory({"clientMemory": "127Mi"})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"maxMemory": "7"}, "each of 1 servers gets 7 bytes"),
        ({"maxMemory": "7", "servers": 8}, "each of 8 servers gets 0 bytes"),
        ({"maxMemory": "2047Ki", "servers": 2}, "each of 2 servers gets 1048064 bytes"),
    ],
)
def test_a_part_that_is_nothing_is_refused(values: Object, said: str) -> None:
    """Redis takes a maxmemory of 0 for no limit at all."""
    with pytest.raises(helm.HelmRefused, match=said):
        memory(values)


def test_a_limit_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(helm.HelmRefused, match=r"the quantity 5\.5Gi cannot be read"):
        memory({"resources": {"limits": {"memory": "5.5Gi"}}})
