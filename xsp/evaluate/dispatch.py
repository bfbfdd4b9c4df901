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
from xsp.evaluate import agents
from xsp.evaluate.agents import Agent, AgentLost, Options, ProcessLost, Progress
from xsp.evaluate.reading import LoadedManifest


@dataclass(eq=False)
class Piece:
    """A manifest to run once."""

    request: LoadedManifest
    fit: list[str]
    """Names of the agents that satisfy it."""

    of: str | None = None
    """Name of the one agent that has to run it; None for any of those that fit."""

    lost: list[str] = field(default_factory=list)
    """Names of agents that died while running it, or whose process for it was killed."""

    result: Path | None = None
    why: str = ""
    """Why there is no result."""


def pieces(
    asked: Sequence[LoadedManifest], there: Sequence[Agent], each: bool
) -> tuple[list[Piece], dict[str, dict[str, list[str]]]]:
    """Return the pieces, and by manifest title and agent name the reasons why an agent is not used.

    Args:
        asked: manifests.
        there: agents.
        each: whether every agent that satisfies a manifest runs it, or only one of them.
    """
    work, reasons = [], {}
    for read in asked:
        fit, refusals = agents.matching(read.manifest, there)
        reasons[read.manifest.title] = refusals
        names = [agent.facts().name for agent in fit]
        if not names:
            work.append(Piece(read, [], why="no agent satisfies the manifest"))
        work += [Piece(read, names, name) for name in names] if each else [Piece(read, names)] if names else []
    return work, reasons


def carry_out(
    work: Sequence[Piece], there: Sequence[Agent], options: Options, progress: Progress,
    ended: Callable[[Piece], object] = lambda piece: None,
) -> None:  # fmt: skip
    """Run all pieces, one at a time per agent, and set the result of each piece or the reason why there is none.

    The piece of an agent that dies goes once to another agent that fits. If only the agent's process for it was killed,
    any agent that fits takes it, once, and the first agent continues.

    Args:
        work: pieces from `pieces`.
        there: the agents.
        options: see `Options`.
        progress: called with the number of pieces that have ended.
        ended: called with each piece that has ended.
    """
    state = _State([piece for piece in work if piece.fit], progress, ended, len(work))
    threads = [threading.Thread(target=_serve, args=(agent, state, options), daemon=True) for agent in there]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if state.failed is not None:
        raise state.failed


class _State:
    """The waiting pieces, and the agents that have died."""

    def __init__(
        self, waiting: list[Piece], progress: Progress, ended: Callable[[Piece], object], total: int
    ) -> None:  # fmt: skip
        self._waiting, self._progress, self._ended, self._total = waiting, progress, ended, total
        self._open = len(waiting)
        self._done = total - len(waiting)
        self._dead: set[str] = set()
        self.failed: Exception | None = None
        """What `progress` or `ended` raised first; all pieces are carried out nevertheless."""

        self._changed = threading.Condition()

    def take(self, name: str) -> Piece | None:
        """Return the next piece for an agent; None if there will be none. Waits while a piece may be put back."""
        with self._changed:
            while self._open:
                for index, piece in enumerate(self._waiting):
                    if name in piece.fit and piece.of in (None, name):
                        return self._waiting.pop(index)
                self._changed.wait(0.2)
            return None

    def end(self, piece: Piece) -> None:
        """Count a piece that has a result, or that will not get one."""
        with self._changed:
            self._open -= 1
            self._done += 1
            try:
                self._progress("manifests", self._done, self._total)
                self._ended(piece)
            except Exception as error:
                self.failed = self.failed or error
            self._changed.notify_all()

    def retry(self, name: str, piece: Piece, why: str) -> None:
        """Put back, once, a piece whose process was killed."""
        with self._changed:
            piece.lost.append(name)
            if len(piece.lost) < 2:
                self._waiting.insert(0, piece)
                self._changed.notify_all()
            else:
                piece.why = f"{why}; tried twice"
                self.end(piece)

    def lose(self, name: str, piece: Piece) -> None:
        """Put back, once, the piece of an agent that died, and release the pieces that waited for that agent only."""
        with self._changed:
            self._dead.add(name)
            piece.lost.append(name)
            self._waiting.insert(0, piece)
            for waiting in list(self._waiting):
                waiting.fit = [agent for agent in waiting.fit if agent not in self._dead]
                waiting.of = None if waiting.of in self._dead else waiting.of
                if len(waiting.lost) > 1:
                    self._give_up(waiting, f"{' and '.join(waiting.lost)} died while running it")
                elif not waiting.fit:
                    self._give_up(waiting, f"{name} died, and no remaining agent satisfies the manifest")
            self._changed.notify_all()

    def _give_up(self, piece: Piece, why: str) -> None:
        self._waiting.remove(piece)
        piece.why = why
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
            piece.why = str(error) if isinstance(error, ManifestError) else f"{type(error).__name__}: {error}"
        state.end(piece)
