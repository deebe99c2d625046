"""What the chart renders for each shard: a Service, a lease that is allowed, and whom the API server asks."""

from __future__ import annotations

from chart import helm
from chart.objects import Object
from surefoot_operator.controller.leader.election_rules import MAX_SHARDS, lease_name


def test_each_shard_has_a_service_of_its_own_and_one_shard_changes_nothing() -> None:
    def services(values: Object) -> dict[str, Object]:
        found = helm.objects(values)
        return {one["metadata"]["name"]: one["spec"] for one in found if one["kind"] == "Service"}

    one, three = services({}), services({"operator": {"shards": 3}})
    assert {name: three[name] for name in one} == one
    assert sorted(three.keys() - one.keys()) == ["surefoot-coordinator-1", "surefoot-coordinator-2"]
    assert three["surefoot-coordinator-2"]["selector"]["surefoot.dev/leads-shard-2"] == "true"
    assert "surefoot.dev/leader" not in three["surefoot-coordinator-2"]["selector"]


def test_the_lease_of_every_shard_that_may_be_is_allowed_whatever_their_number_is_now() -> None:
    """While the number goes down, replicas of the new one hold and give back the leases of the old one."""
    wanted = {lease_name("surefoot-operator", shard) for shard in range(MAX_SHARDS)}
    for shards in (1, MAX_SHARDS):
        role = helm.one(helm.objects({"operator": {"shards": shards}}), "Role", "surefoot-operator")
        [named] = [
            rule["resourceNames"]
            for rule in role["rules"]
            if rule["verbs"] == ["get", "update"] and "leases" in rule["resources"]
        ]
        assert set(named) == wanted


def test_evictions_are_asked_of_every_shards_leader() -> None:
    """Each knows what its own jobs lose with a node, and any of them may have the eviction wait."""
    rendered = helm.objects({"operator": {"shards": 3, "admission": {"evictions": {"enabled": True}}}})
    [configuration] = [one for one in rendered if one["kind"] == "ValidatingWebhookConfiguration"]
    asked = {hook["name"]: hook["clientConfig"]["service"] for hook in configuration["webhooks"]}
    assert list(asked) == [f"evictions{suffix}.surefoot.dev" for suffix in ("", "-1", "-2")]
    assert [one["name"] for one in asked.values()] == [f"surefoot-coordinator{suffix}" for suffix in ("", "-1", "-2")]
    for service in asked.values():
        ports_of = helm.one(rendered, "Service", service["name"])["spec"]["ports"]
        assert service["port"] in [port["port"] for port in ports_of]


def test_only_the_leader_is_reached_by_agents() -> None:
    service = helm.one(helm.objects(), "Service", "surefoot-coordinator")
    assert service["spec"]["selector"]["surefoot.dev/leader"] == "true"
    assert service["spec"]["publishNotReadyAddresses"] is True
    template = helm.one(helm.objects(), "Deployment", "surefoot-operator")["spec"]["template"]
    assert "surefoot.dev/leader" not in template["metadata"]["labels"]
