"""Runs manifests on several agents concurrently: each once, and once more if its agent or process died.

A free agent takes the next piece. A piece is done when its result has arrived here, and only this process writes
results: a dead agent loses none, and none is stored twice. Evaluations requested from a server wait in
`xsp.evaluate.web.queue` instead, which runs one at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xsp.errors import ManifestError
from xsp.evaluate.agents import Agent, AgentLost, Options, ProcessLost, Progress, match_agents
from xsp.evaluate.reading import LoadedManifest


@dataclass(eq=False)
class Piece:
    """A manifest to run once."""

    request: LoadedManifest
    candidates: list[str]
    """Names of the agents that satisfy it."""

    assigned_agent: str | None = None
    """Name of the only agent that may run it; None for any of the candidates."""

    lost_agents: list[str] = field(default_factory=list)
    """Names of agents that died while running it, or whose process for it was killed."""

    result: Path | None = None
    failure: str = ""
    """Why there is no result."""


def pieces(
    requests: Sequence[LoadedManifest], agents: Sequence[Agent], on_each_agent: bool
) -> tuple[list[Piece], dict[str, dict[str, list[str]]]]:
    """Return the pieces, and by manifest title and agent name the reasons why an agent is not used.

    Args:
        requests: manifests.
        agents: agents.
        on_each_agent: whether every agent that satisfies a manifest runs it, or only one of them.
    """
    work, reasons = [], {}
    for request in requests:
        suitable, refusals = match_agents(request.manifest, agents)
        reasons[request.manifest.title] = refusals
        names = [agent.facts().name for agent in suitable]
        if not names:
            work.append(Piece(request, [], failure="no agent satisfies the manifest"))
        elif on_each_agent:
            work += [Piece(request, names, name) for name in names]
        else:
            work.append(Piece(request, names))
    return work, reasons


def run_pieces(
    work: Sequence[Piece], agents: Sequence[Agent], options: Options, progress: Progress,
    on_end: Callable[[Piece], object] = lambda piece: None,
) -> None:  # fmt: skip
    """Run all pieces, one at a time per agent, and set the result of each piece or the reason why there is none.

    The piece of an agent that dies goes once to another candidate. If only the agent's process for it was killed, any
    candidate takes it, once, and the first agent continues.

    Args:
        work: pieces from `pieces`.
        agents: the agents.
        options: see `Options`.
        progress: called with the number of pieces that have ended.
        on_end: called with each piece that has ended.
    """
    state = _State([piece for piece in work if piece.candidates], progress, on_end, len(work))
    threads = [threading.Thread(target=_serve, args=(agent, state, options), daemon=True) for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if state.callback_error is not None:
        raise state.callback_error


class _State:
    """The waiting pieces, and the agents that have died."""

    def __init__(
        self, waiting: list[Piece], progress: Progress, on_end: Callable[[Piece], object], total: int
    ) -> None:  # fmt: skip
        self._waiting, self._progress, self._on_end, self._total = waiting, progress, on_end, total
        self._open_count = len(waiting)
        self._ended_count = total - len(waiting)
        self._dead_agents: set[str] = set()
        self.callback_error: Exception | None = None
        """The first error that `progress` or `on_end` raised; all pieces run nevertheless."""

        self._changed = threading.Condition()

    def take(self, name: str) -> Piece | None:
        """Return the next piece for an agent; None if there will be none. Waits while a piece may be put back."""
        with self._changed:
            while self._open_count:
                for index, piece in enumerate(self._waiting):
                    if name in piece.candidates and piece.assigned_agent in (None, name):
                        return self._waiting.pop(index)
                self._changed.wait(0.2)
            return None

    def end(self, piece: Piece) -> None:
        """Count a piece that has a result, or that will not get one."""
        with self._changed:
            self._open_count -= 1
            self._ended_count += 1
            try:
                self._progress("manifests", self._ended_count, self._total)
                self._on_end(piece)
            except Exception as error:
                self.callback_error = self.callback_error or error
            self._changed.notify_all()

    def retry(self, name: str, piece: Piece, reason: str) -> None:
        """Put back, once, a piece whose process was killed."""
        with self._changed:
            piece.lost_agents.append(name)
            if len(piece.lost_agents) < 2:
                self._waiting.insert(0, piece)
                self._changed.notify_all()
            else:
                piece.failure = f"{reason}; tried twice"
                self.end(piece)

    def lose(self, name: str, piece: Piece) -> None:
        """Put back, once, the piece of an agent that died, and release the pieces that waited for that agent only."""
        with self._changed:
            self._dead_agents.add(name)
            piece.lost_agents.append(name)
            self._waiting.insert(0, piece)
            for waiting in list(self._waiting):
                waiting.candidates = [agent for agent in waiting.candidates if agent not in self._dead_agents]
                if waiting.assigned_agent in self._dead_agents:
                    waiting.assigned_agent = None
                if len(waiting.lost_agents) > 1:
                    self._give_up(waiting, f"{' and '.join(waiting.lost_agents)} died while running it")
                elif not waiting.candidates:
                    self._give_up(waiting, f"{name} died, and no remaining agent satisfies the manifest")
            self._changed.notify_all()

    def _give_up(self, piece: Piece, reason: str) -> None:
        self._waiting.remove(piece)
        piece.failure = reason
        self.end(piece)


def _serve(agent: Agent, state: _State, options: Options) -> None:
    name = agent.facts().name
    while (piece := state.take(name)) is not None:
        try:
            piece.result = agent.submit(piece.request.manifest, piece.request.folder, options, lambda *args: None)
        except AgentLost:
            state.lose(name, piece)
            return
        except ProcessLost as error:
            state.retry(name, piece, str(error))
            continue
        except Exception as error:
            piece.failure = str(error) if isinstance(error, ManifestError) else f"{type(error).__name__}: {error}"
        state.end(piece)
