"""`quantize serve bundled` as a user starts it."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager

import psutil

KEY = "a-key-for-this-test"


@contextmanager
def process(*options: str, checkpoint: str = "bundled") -> Generator[tuple[str, psutil.Process]]:
    """A server as a user starts it; ended with SIGTERM, and then its exit code counts."""
    command = [sys.executable, "-m", "quantize", "serve", checkpoint, "--port", "0", *options]
    environment = os.environ | {"QUANTIZE_API_KEY": KEY}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        seen = ""
        while not (url := re.search(r"at (http://\S+) with the key", seen)):
            line = server.stderr.readline()
            assert line, seen
            seen += line
        log: list[str] = []  # the pipe must be read on, or the server would wait for it
        reader = threading.Thread(target=lambda: log.extend(server.stderr or ()))
        reader.start()
        try:
            yield url[1], psutil.Process(server.pid)
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(60)
            reader.join()
        assert code == 0
        assert KEY not in seen + "".join(log)
        assert "Traceback" not in "".join(log), "".join(log)
