"""JobStatus <-> JSON: camelCase as a CRD has it, nothing lost either way. Pure; called by fabrics that store status.

Reading is lenient about fields that a newer operator added (they are left out) and strict about everything else.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from surefoot.protocol.strict import JsonShape, Misfit, read
from surefoot_operator.api.status import JobStatus
from surefoot_operator.api.yaml_names import camel_case
from surefoot_operator.errors import InvariantBroken

_SHAPE = JsonShape(foreign=True, rename=camel_case)


def status_to_json(status: JobStatus) -> dict[str, Any]:
    """The status as JSON can hold it; fields at their default are left out."""
    return typing.cast(dict[str, Any], _plain(status))


def status_from_json(body: Mapping[str, Any]) -> JobStatus:
    """The inverse of `status_to_json`. Raises InvariantBroken that names the field and what stands there."""
    try:
        return read(JobStatus, dict(body), _SHAPE)
    except Misfit as misfit:
        raise InvariantBroken(f"status{misfit.path} {misfit.why}: the stored status was damaged") from misfit


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
