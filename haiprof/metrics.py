"""Prometheus text on a port, if HAIPROF_PORT is set: this port plus the local rank.

Format: "Exposition formats" of Prometheus, text version 0.0.4.
"""

import http.server
import os
import re
import threading


class Metrics:
    """Serves the collector's last numbers on 127.0.0.1, or on HAIPROF_ADDRESS, until `close`. OSError: port
    unavailable."""

    def __init__(self, collector, port):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                body = text(collector).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        address = os.environ.get("HAIPROF_ADDRESS", "127.0.0.1"), port + int(os.environ.get("LOCAL_RANK", "0"))
        self._server = http.server.HTTPServer(address, Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="haiprof metrics", daemon=True)
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


def text(collector) -> str:
    """haiprof_steps, haiprof_step_seconds by phase, and each counter that is one number."""
    label = f'rank="{collector.rank}"'
    rows = ["# TYPE haiprof_steps counter", f"haiprof_steps{{{label}}} {collector.done}"]
    latest = dict(collector.latest)
    phases = [name for name in latest if name.startswith("step.")]
    rows += ["# TYPE haiprof_step_seconds gauge"] * bool(phases)
    for name in phases:
        rows.append(f'haiprof_step_seconds{{{label},phase="{name.partition(".")[2]}"}} {latest[name]}')
    for name, value in latest.items():
        if name not in phases and isinstance(value, int | float):
            own = "haiprof_" + re.sub(r"\W", "_", name)
            rows += [f"# TYPE {own} gauge", f"{own}{{{label}}} {value}"]
    return "\n".join(rows) + "\n"
