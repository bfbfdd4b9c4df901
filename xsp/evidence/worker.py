"""The worker process that reads runs and answers questions in lines of JSON, so that a long question can be ended.

The server (`xsp.evidence.server`) starts it with `xsp.processes.Asked`, and communicates with the client itself.
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
    paths, most, answers = json.loads(arguments[0]), int(arguments[1]), int(arguments[2])
    tools = Tools(Places(paths), most)
    with os.fdopen(answers, "wb") as out:
        for line in sys.stdin.buffer:
            asked = json.loads(line)
            try:
                said = tools.call(asked["tool"], asked["arguments"])
            except Exception as failed:
                print(f"xsp mcp: {asked['tool']}: {type(failed).__name__}: {failed}", file=sys.stderr, flush=True)
                said = form.error(f"xsp failed ({type(failed).__name__}); its log says more")
            try:
                out.write(form.text(said).encode("utf-8", "replace") + b"\n")
                out.flush()
            except BrokenPipeError:
                return
