"""PromQL of the metrics of the servers that are chosen."""

ON = 'job=~"$job",instance=~"$instance"'
RATE = "$__rate_interval"


def series(name: str, labels: str = "") -> str:
    return f"{name}{{{ON}{',' + labels if labels else ''}}}"


def rate(name: str, by: str = "", labels: str = "") -> str:
    """Of a counter, a second; summed over all servers that are chosen."""
    inner = f"rate({series(name, labels)}[{RATE}])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def total(name: str, by: str = "", labels: str = "") -> str:
    return f"sum by ({by}) ({series(name, labels)})" if by else f"sum({series(name, labels)})"


def mean(name: str, by: str = "") -> str:
    """Of a histogram's observations."""
    return f"{rate(name + '_sum', by)} / {rate(name + '_count', by)}"


def quantiles(name: str, by: str = "", labels: str = "", of=(0.5, 0.9, 0.99)) -> list:
    legend = f"{{{{{by}}}}} " if by else ""
    buckets = rate(name + "_bucket", f"{by}, le" if by else "le", labels)
    return [
        (
            f"histogram_quantile({q}, {buckets})",
            f"{legend}p{q * 100:g}",
        )
        for q in of
    ]
