"""The worker process that reads runs and answers questions in lines of JSON, so that a long question can be ended.

The server (`xsp.evidence.server`) starts it with `xsp.processes.WorkerProcess`, and communicates with the client
itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence

from xsp.evidence import form
from xsp.evidence.places import Places
from xsp.evidence.tools import Tools

START = "import sys; sys.path.insert(0, sys.argv[1]); from xsp.evidence.worker import main; main(sys.argv[2:])"
"""The code that the process runs."""


def main(arguments: Sequence[str]) -> None:
    """Answer until stdin ends.

    Args:
        arguments: the paths as JSON, the limit of an answer in bytes, and the file descriptor for answers.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends it
    paths, max_bytes, answers = json.loads(arguments[0]), int(arguments[1]), int(arguments[2])
    tools = Tools(Places(paths), max_bytes)
    with os.fdopen(answers, "wb") as stream:
        for line in sys.stdin.buffer:
            request = json.loads(line)
            try:
                answer = tools.call(request["tool"], request["arguments"])
            except Exception as error:
                print(f"xsp mcp: {request['tool']}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                answer = form.error(f"xsp failed ({type(error).__name__}); see its log")
            try:
                stream.write(form.text(answer).encode("utf-8", "replace") + b"\n")
                stream.flush()
            except BrokenPipeError:
                return
