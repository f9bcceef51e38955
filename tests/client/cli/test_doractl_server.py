"""doractl for those who operate a server, and its top."""

import http.server
import json
import threading

import pytest
from dorad.cli.top import Rates, parse_metrics


def test_operates(doractl, server):
    assert "fake-model (llama)" in doractl("info")
    assert json.loads(doractl("info", "-o", "json"))["model"]["vocab_size"] == 1000
    assert doractl("pause", "--mode", "wait") == "paused (wait); 2 requests affected\n"
    assert "paused" in doractl("info")
    assert doractl("pause", "-a", "pirate") == "paused pirate (keep); 2 requests affected\n"
    assert doractl("resume", "-a", "pirate") == "resumed\n"
    assert doractl("resume") == "resumed\n"
    assert (
        doractl("limit-gpu-share", "0.25", "--for", "30") == "steps take at most 25% of the time\n"
    )
    assert server.gpu_share_requests[0].time_to_live.seconds == 30
    assert "25% of the time" in doractl("info")
    assert json.loads(doractl("limit-gpu-share", "0.5", "--id", "b", "-o", "json")) == {
        "gpu_share": 0.25
    }
    assert doractl("end-gpu-share-limit") == "ended; steps take at most 50% of the time\n"
    assert json.loads(doractl("end-gpu-share-limit", "--id", "b", "-o", "json")) == {
        "ended": True,
        "gpu_share": 1.0,
    }
    assert doractl("end-gpu-share-limit") == "no limit doractl; steps take all the time\n"
    assert doractl("abort", "r1", "r2") == "3 requests aborted\n"
    assert json.loads(doractl("abort", "--all", "-o", "json")) == {"aborted": 3}
    assert doractl("health") == "serving\n"
    server.health.set("", 2)
    doractl("health", code=69)


def test_top_shows_rates_from_the_metrics(doractl, folder):
    served = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            served.append(self.path)
            body = f"dorad_generated_tokens_total {100 * len(served)}\n".encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    try:
        doractl("adapters", "publish", "a", folder)
        url = f"http://127.0.0.1:{web.server_port}/metrics"
        out = doractl("top", "--metrics", url, "--count", "2", "--interval", "0.1", "-o", "json")
        first, second = [json.loads(line) for line in out.splitlines()]
        assert "generated tokens/s" not in first["rates"]
        assert 0 < second["rates"]["generated tokens/s"] < 1100
        frame = doractl("top", "--metrics", url, "--count", "1")
        assert "KV pages" in frame and "25%" in frame and "generation 2" in frame
    finally:
        web.shutdown()
        web.server_close()


def test_metrics_text_is_summed_by_name():
    text = (
        "# HELP x_total Help.\n# TYPE x_total counter\n"
        'x_total{a="1 } 2",b="c"} 3\nx_total{a="2"} 4.5 1700000000\n'
        'y_bucket{le="1"} 9\ny_sum 2\ny_count 4\nbroken\n'
    )
    assert parse_metrics(text) == {"x_total": 7.5, "y_sum": 2.0, "y_count": 4.0}


def test_rates_survive_a_restart_of_the_server():
    rates = Rates()
    name = "dorad_engine_step_seconds"
    assert rates.update({f"{name}_sum": 1.0, f"{name}_count": 10}, 0.0) == {}
    now = rates.update({f"{name}_sum": 3.0, f"{name}_count": 14}, 1.0)
    assert now["step ms"] == pytest.approx(500)
    assert "step ms" not in rates.update({f"{name}_sum": 0.1, f"{name}_count": 1}, 2.0)
