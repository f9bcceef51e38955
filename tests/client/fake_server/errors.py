"""How calls are refused and broken off."""

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2


def fail(context, code, reason, message, violations=(), retry_after=None, facts=None):
    """Ends the call with AIP-193 details, as the real server does."""
    facts = facts or {"k": "v"}
    details = [error_details_pb2.ErrorInfo(reason=reason, domain="dorad", metadata=facts)]
    if violations:
        bad = error_details_pb2.BadRequest()
        for field, why, description in violations:
            bad.field_violations.add(field=field, reason=why, description=description)
        details.append(bad)
    if retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(retry_after * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    trailers = [("grpc-status-details-bin", status.SerializeToString())]
    if retry_after is not None:
        trailers.append(("grpc-retry-pushback-ms", str(int(retry_after * 1000))))
    elif code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        trailers.append(("grpc-retry-pushback-ms", "-1"))
    context.set_trailing_metadata(trailers)
    context.abort(code, message)


def unavailable(context):
    context.abort(grpc.StatusCode.UNAVAILABLE, "warming up")


def connection_lost(context):
    context.abort(grpc.StatusCode.UNAVAILABLE, "connection lost")


def shutting_down(context):
    fail(context, grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN", "the server ends", retry_after=1.0)


def overloaded(retry_after):
    """None: it is of no use to come back."""

    def refuse(context):
        fail(
            context,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "QUEUE_FULL",
            "the queue is full",
            retry_after=retry_after,
        )

    return refuse
