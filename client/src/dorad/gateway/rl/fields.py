"""Fields of control routes, which clients send in the query or as JSON."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar, get_origin

from pydantic import BeforeValidator
from starlette.requests import Request

from dorad.gateway import validation
from dorad.gateway.core import Gateway
from dorad.gateway.http import read_json
from dorad.gateway.validation import Body

M = TypeVar("M", bound=Body)


def _flag(value: Any) -> Any:
    """A query has text only."""
    if isinstance(value, str):
        return {"true": True, "1": True, "false": False, "0": False}.get(value.lower(), value)
    return value


Flag = Annotated[bool, BeforeValidator(_flag)]


async def read(gateway: Gateway, request: Request, model: type[M]) -> M:
    """Raises Refusal. A body may be missing."""
    raw = await read_json(request, gateway.limits)
    query = request.query_params
    given: dict[str, Any] = {}
    for name in query:
        field = model.model_fields.get(name)
        several = field is not None and get_origin(field.annotation) is list
        given[name] = query.getlist(name) if several else query[name]
    if raw:
        given |= validation.parse(raw)
    return validation.checked(given, model)
