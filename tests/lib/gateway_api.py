"""Schemas of the Gateway API's resources, v1, and of its Inference Extension, of the fields in use.

Of their custom resource definitions; no field beside these is taken.
"""

from typing import Any

import jsonschema

_NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
_GROUP = {
    "type": "string",
    "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
}
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_DURATION = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": required | optional,
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


_NUMBERED = _object({"number": _PORT})
_POOL = _object(
    {
        "selector": _object(
            {"matchLabels": {"type": "object", "additionalProperties": {"type": "string"}}}
        ),
        "targetPorts": _list(_NUMBERED, 8),
        "endpointPickerRef": _object(
            {"name": _NAME},
            group=_GROUP,
            kind={"type": "string"},
            port=_NUMBERED,
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    }
)
_GATEWAY = _object(
    {
        "gatewayClassName": _NAME,
        "listeners": _list(
            _object(
                {
                    "name": _NAME,
                    "port": _PORT,
                    "protocol": {"enum": ["HTTP", "HTTPS", "TLS", "TCP", "UDP"]},
                }
            ),
            64,
        ),
    }
)
_MATCH = _object(
    {},
    path=_object(
        {},
        type={"enum": ["Exact", "PathPrefix", "RegularExpression"]},
        value={"type": "string", "pattern": "^/"},
    ),
)
_ROUTE = _object(
    {
        "parentRefs": _list(_object({"name": _NAME}), 32),
        "rules": _list(
            _object(
                {},
                matches=_list(_MATCH, 64),
                backendRefs=_list(
                    _object({"name": _NAME}, group=_GROUP, kind={"type": "string"}), 16
                ),
                timeouts=_object({}, request=_DURATION, backendRequest=_DURATION),
            ),
            16,
        ),
    }
)
_KINDS = {
    "InferencePool": ("inference.networking.k8s.io/v1", _POOL),
    "Gateway": ("gateway.networking.k8s.io/v1", _GATEWAY),
    "HTTPRoute": ("gateway.networking.k8s.io/v1", _ROUTE),
}
KINDS = frozenset(_KINDS)


def validate(item: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError."""
    version, spec = _KINDS[item["kind"]]
    metadata = _object({"name": _NAME}, namespace=_NAME)
    schema = _object(
        {
            "apiVersion": {"const": version},
            "kind": {"const": item["kind"]},
            "metadata": metadata,
            "spec": spec,
        }
    )
    jsonschema.Draft202012Validator(schema).validate(item)
