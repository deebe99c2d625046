"""Several Redis servers on a node: each has what the only one has, under names of its own, and none knows of the others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chart import helm
from chart.objects import Object, ports
from chart.test_seams import environment
from support.servers.memory_cgroup import container_bytes
from surefoot.memory_server.sidecar.sidecar_settings import MAX_SERVERS, read_sidecar_settings
from surefoot_operator.platforms.kubernetes.pods import SERVER_SOCKET

BESIDE: Object = {
    "tls": {"enabled": True},
    "localSocket": {"enabled": True},
    "extraEnv": [{"name": "A", "value": "b"}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
}
CASES: dict[str, Object] = {
    "plain": {},
    "tls": {"tls": {"enabled": True}},
    "socket": {"localSocket": {"enabled": True}},
    "own command": {"command": ["start", "/etc/surefoot-memory/redis.conf"]},
    "everything": BESIDE,
}


def rendered(servers: int, values: Object | None = None) -> list[Object]:
    return helm.objects({"memoryTier": {"servers": servers, **(values or {})}})


def template(found: list[Object]) -> Object:
    made: Object = helm.one(found, "DaemonSet", "surefoot-memory")["spec"]["template"]
    return made


def servers_of(found: list[Object]) -> list[Object]:
    return [one for one in template(found)["spec"]["containers"] if one["name"] != "companion"]


def names(number: int) -> dict[str, str]:
    """What server `number` has for itself -> what the only one calls it."""
    if number == 0:
        return {}
    return {f"{name}-{number}": name for name in ("redis", "data", "configuration")}


def as_the_first(container: Object, number: int) -> Any:
    """With the names and the port of server 0."""
    text = json.dumps(container).replace(f": {6379 + number}", ": 6379")
    for own, first in names(number).items():
        text = text.replace(f'"{own}"', f'"{first}"')
    return json.loads(text)


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_each_server_s_container_is_as_the_first_but_for_its_names(values: Object) -> None:
    found = servers_of(rendered(3, values))
    assert [one["name"] for one in found] == ["redis", "redis-1", "redis-2"]
    assert [as_the_first(one, number) for number, one in enumerate(found)] == [found[0]] * 3


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_each_server_sees_its_own_configuration_and_folder_at_the_same_paths(values: Object) -> None:
    found = rendered(3, values)
    files = helm.one(found, "ConfigMap", "surefoot-memory")["data"]
    volumes = {one["name"]: one for one in template(found)["spec"]["volumes"]}
    told = []
    for container in servers_of(found):
        at = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}
        [item] = at["/etc/surefoot-memory"]["configMap"]["items"]
        assert item["path"] == "redis.conf"
        told.append(files[item["key"]].splitlines())
        assert at["/data"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Mi"}
    folders = [m["name"] for one in servers_of(found) for m in one["volumeMounts"] if m["mountPath"] == "/data"]
    assert len(set(folders)) == 3
    tls, by_socket = "tls" in values, "localSocket" in values
    for server, lines in enumerate(told):
        wanted = {f"tls-port {6379 + server}" if tls else f"port {6379 + server}", f"maxmemory {(4 << 30) // 3}"}
        assert wanted | ({"port 0"} if tls else set()) <= set(lines)
        sockets = [line for line in lines if line.startswith("unixsocket ")]
        assert sockets == ([f"unixsocket {SERVER_SOCKET.format(server=server)}"] if by_socket else [])


def test_one_server_is_called_as_before_there_were_several() -> None:
    """Else an upgrade would be a new revision of every memory tier."""
    found = template(rendered(1))
    assert ports(found) == {"redis": 6379, "metrics": 9465}
    assert [one["name"] for one in found["spec"]["containers"]] == ["redis", "companion"]
    assert found["spec"]["volumes"][:2] == [
        {"name": "data", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {"name": "configuration", "configMap": {"name": "surefoot-memory"}},
    ]
    assert "SUREFOOT_SIDECAR_SERVERS" not in str(found)
    assert list(helm.one(rendered(1), "ConfigMap", "surefoot-memory")["data"]) == ["redis.conf"]


def test_values_of_a_release_before_there_were_several_mean_one() -> None:
    """`helm upgrade --reuse-values` keeps them as they were, without the number."""
    assert helm.objects({"memoryTier": {"servers": None}}) == helm.objects()


def test_another_number_of_servers_is_another_revision_whatever_else_is_the_same() -> None:
    digests = {template(rendered(n))["metadata"]["annotations"]["checksum/redis-conf"] for n in (1, 2, 3)}
    assert len(digests) == 3


def test_parts_of_a_node_are_equal_and_never_more_than_it_may_take() -> None:
    for servers, maximum in ((2, "1Gi"), (3, "1Gi"), (8, 1_000_000_007)):
        found = rendered(servers, {"maxMemory": maximum})
        files = helm.one(found, "ConfigMap", "surefoot-memory")["data"].values()
        lines = [line.split() for text in files for line in text.splitlines()]
        parts = [int(line[1]) for line in lines if line[:1] == ["maxmemory"]]
        whole = 1 << 30 if maximum == "1Gi" else int(maximum)
        assert parts == [whole // servers] * servers
        limits = [int(one["resources"]["limits"]["memory"]) for one in servers_of(found)]
        assert limits == [container_bytes(part, 256 << 20) for part in parts]


@pytest.mark.parametrize("servers", [1, 2, MAX_SERVERS])
def test_the_companion_finds_every_server_beside_it(servers: int) -> None:
    found = rendered(servers)
    told = read_sidecar_settings(environment(found, "DaemonSet", "surefoot-memory", "companion"))
    named = ports(template(found))
    assert named.pop("metrics") == told.port
    assert named == {f"redis-{n}" if n else "redis": told.redis_port + n for n in range(told.servers)}


def test_every_server_that_may_be_is_let_in_whatever_their_number_is_now() -> None:
    """Pods of the revision before are read and sealed until they are replaced, though the number went down."""
    most = {"redis", *(f"redis-{server}" for server in range(1, MAX_SERVERS))}
    for servers in (1, 3):
        policy = helm.one(rendered(servers), "NetworkPolicy", "surefoot-memory")["spec"]
        let_in = [{port["port"] for port in rule["ports"]} for rule in policy["ingress"]]
        assert let_in == [most, {"metrics"}]
    schema = json.loads((helm.CHART / "values.schema.json").read_text())
    assert schema["properties"]["memoryTier"]["properties"]["servers"]["maximum"] == MAX_SERVERS
