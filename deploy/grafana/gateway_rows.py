"""The dashboard's row of gateways: their requests, tokens, times and servers."""

from panel import Panel
from queries import RATE, mean, quantiles, rate, series, total

GATEWAY_ROWS = [
    (
        "Gateway",
        [
            Panel(
                "Gateway: requests",
                "reqps",
                [(rate("dorad_gateway_requests_total", "endpoint, code"), "{{endpoint}} {{code}}")],
                "Ended requests by route and HTTP status or gRPC code. 499: the client went away.",
            ),
            Panel(
                "Gateway: tokens",
                "short",
                [(rate("dorad_gateway_tokens_total", "kind"), "{{kind}} tokens/s")],
                "Of ended requests, so long streams count at their end.",
            ),
            Panel(
                "Gateway: time of a request",
                "s",
                [
                    (mean("dorad_gateway_request_seconds"), "mean"),
                    *quantiles("dorad_gateway_request_seconds", of=(0.5, 0.99)),
                    *[
                        (expression, f"first token {legend}")
                        for expression, legend in quantiles(
                            "dorad_gateway_time_to_first_token_seconds", of=(0.5, 0.99)
                        )
                    ],
                ],
                "To the end of the answer, and of streams to the first token.",
            ),
            Panel(
                "Gateway: in flight",
                "short",
                [
                    (total("dorad_gateway_requests_in_flight"), "requests"),
                    (total("dorad_gateway_connections"), "HTTP connections"),
                ],
                "Requests in flight (--max-requests is the limit) and open HTTP connections.",
            ),
            Panel(
                "Gateway: servers that are ready",
                "short",
                [(f"min by (server) ({series('dorad_gateway_server_ready')})", "{{server}}")],
                "0 while a gateway sends no requests to the server.",
            ),
            Panel(
                "Gateway: CPU",
                "short",
                [
                    (
                        f"sum by (instance) (rate({series('process_cpu_seconds_total')}[{RATE}]) "
                        f"and on (instance) {series('dorad_gateway_connections')})",
                        "{{instance}} cores",
                    )
                ],
                "A gateway is one event loop: near 1 core it is the bottleneck, add another one.",
            ),
        ],
    ),
]
