"""Converts JobStatus to camelCase JSON and back without loss.

Pure; called by fabrics that store status. Reading ignores fields that a newer operator added, and is strict otherwise. The
former version, without `schemaVersion`, had a mapping for each member and holder and its moments in Unix seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from surefoot.protocol.strict import JsonShape, Misfit, read
from surefoot_operator.api.status import JobStatus
from surefoot_operator.api.status_crowds import holder_rows, holders_in, member_rows, members_in
from surefoot_operator.api.status_moments import with_moments, with_seconds
from surefoot_operator.api.yaml_names import camel_case
from surefoot_operator.errors import InvariantBroken

SCHEMA_VERSION = 2
"""What this operator writes, in `schemaVersion`."""

_SHAPE = JsonShape(foreign=True, rename=camel_case)


def status_to_json(status: JobStatus) -> dict[str, Any]:
    """Converts a status to JSON, leaving out fields at their default."""
    members = () if status.world is None else status.world.members
    world = None if status.world is None else replace(status.world, members=())
    body: dict[str, Any] = with_moments(_plain(replace(status, world=world, named_holders=())))
    if members:
        body["world"]["members"] = member_rows(members)
    if status.named_holders:
        body["namedHolders"] = holder_rows(status.named_holders, members)
    return {"schemaVersion": SCHEMA_VERSION, **body} if body else {}


def status_from_json(body: Mapping[str, Any]) -> JobStatus:
    """Parses a status. Raises InvariantBroken with the damaged field and its value."""
    try:
        return _read(dict(body))
    except Misfit as misfit:
        raise InvariantBroken(f"status{misfit.path} {misfit.why}: the stored status was damaged") from misfit


def _read(body: dict[str, Any]) -> JobStatus:
    version = body.get("schemaVersion", 1)
    if version not in (1, SCHEMA_VERSION):
        raise Misfit(".schemaVersion", f"is {version!r:.40}: an operator of another version wrote it")
    world = body.get("world")
    members = members_in(world.get("members")) if isinstance(world, dict) else None
    if isinstance(world, dict) and members is not None:
        body["world"] = {name: value for name, value in world.items() if name != "members"}
    holders = holders_in(body.get("namedHolders"), members or ())
    if holders is not None:
        del body["namedHolders"]
    status = read(JobStatus, body if version == 1 else with_seconds(body), _SHAPE)
    if members is not None and status.world is not None:
        status = replace(status, world=replace(status.world, members=members))
    return status if holders is None else replace(status, named_holders=holders)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            camel_case(field.name): _plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != _default(field)
        }
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, dict) else value


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default  # MISSING where it is required: equal to nothing that can stand in a field
