"""Dispatches manifests to several agents at the same time: each once, and once more if its agent or process died.

An agent takes the next piece when it is free. A piece is done when its result has arrived here, and only this process
writes results: a dead agent loses none, and none is stored twice. Evaluations that a server was asked for wait in
`xsp.evaluate.web.queue`, which runs one at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xsp.errors import ManifestError
from xsp.evaluate import agents
from xsp.evaluate.agents import Agent, AgentLost, Options, ProcessLost, Progress
from xsp.evaluate.reading import Read


@dataclass(eq=False)
class Piece:
    """A manifest that is to be carried out once."""

    asked: Read
    fit: list[str]
    """Names of the agents that satisfy it."""

    of: str | None = None
    """Name of the one agent that is to carry it out; any of those that fit if None."""

    lost: list[str] = field(default_factory=list)
    """Names of agents that died over it, or whose process for it was killed."""

    result: Path | None = None
    why: str = ""
    """Why there is no result."""


def pieces(
    asked: Sequence[Read], there: Sequence[Agent], each: bool
) -> tuple[list[Piece], dict[str, dict[str, list[str]]]]:
    """Return the work, and by title of a manifest and name of an agent the reasons why it is not put to that one.

    Args:
        asked: manifests.
        there: agents.
        each: whether every agent that satisfies a manifest carries it out, or one of them.
    """
    made, reasons = [], {}
    for read in asked:
        fit, why = agents.matching(read.manifest, there)
        reasons[read.manifest.title] = why
        names = [agent.facts().name for agent in fit]
        if not names:
            made.append(Piece(read, [], why="no agent satisfies it"))
        made += [Piece(read, names, name) for name in names] if each else [Piece(read, names)] if names else []
    return made, reasons


def carry_out(
    work: Sequence[Piece], there: Sequence[Agent], options: Options, progress: Progress,
    ended: Callable[[Piece], object] = lambda piece: None,
) -> None:  # fmt: skip
    """Carry out all pieces, each agent one at a time, and write into each its result or why there is none.

    The piece of an agent that dies goes to another one that fits, once. If only the agent's process for it was killed,
    any agent that fits takes it, once, and that agent goes on.

    Args:
        work: of `pieces`.
        there: the agents.
        options: see `Options`.
        progress: called with how many pieces have ended.
        ended: called with each piece when it has.
    """
    state = _State([each for each in work if each.fit], progress, ended, len(work))
    threads = [threading.Thread(target=_serve, args=(agent, state, options), daemon=True) for agent in there]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


class _State:
    """What is to be done, and who is there."""

    def __init__(
        self, waiting: list[Piece], progress: Progress, ended: Callable[[Piece], object], total: int
    ) -> None:  # fmt: skip
        self._waiting, self._progress, self._ended, self._total = waiting, progress, ended, total
        self._open = len(waiting)
        self._done = total - len(waiting)
        self._dead: set[str] = set()
        self._changed = threading.Condition()

    def take(self, name: str) -> Piece | None:
        """Return the next piece of an agent; None if there will be none. Waits while a piece may come back."""
        with self._changed:
            while self._open:
                for number, piece in enumerate(self._waiting):
                    if name in piece.fit and piece.of in (None, name):
                        return self._waiting.pop(number)
                self._changed.wait(0.2)
            return None

    def end(self, piece: Piece) -> None:
        """Count a piece that has its result, or will have none."""
        with self._changed:
            self._open -= 1
            self._done += 1
            self._progress("manifests", self._done, self._total)
            self._ended(piece)
            self._changed.notify_all()

    def again(self, name: str, piece: Piece, why: str) -> None:
        """Put back the piece whose process was killed, once."""
        with self._changed:
            piece.lost.append(name)
            if len(piece.lost) < 2:
                self._waiting.insert(0, piece)
                self._changed.notify_all()
            else:
                piece.why = f"{why}; it was tried twice"
                self.end(piece)

    def lose(self, name: str, piece: Piece) -> None:
        """Put back the piece of an agent that died, once, and give the others what waited for that one alone."""
        with self._changed:
            self._dead.add(name)
            piece.lost.append(name)
            self._waiting.insert(0, piece)
            for each in list(self._waiting):
                each.fit = [other for other in each.fit if other not in self._dead]
                each.of = None if each.of in self._dead else each.of
                if len(each.lost) > 1:
                    self._give_up(each, f"{' and '.join(each.lost)} died over it")
                elif not each.fit:
                    self._give_up(each, f"{name} died, and no agent is left that satisfies it")
            self._changed.notify_all()

    def _give_up(self, piece: Piece, why: str) -> None:
        self._waiting.remove(piece)
        piece.why = why
        self.end(piece)


def _serve(agent: Agent, state: _State, options: Options) -> None:
    name = agent.facts().name
    while (piece := state.take(name)) is not None:
        try:
            piece.result = agent.submit(piece.asked.manifest, piece.asked.folder, options, lambda *said: None)
        except AgentLost:
            state.lose(name, piece)
            return
        except ProcessLost as error:
            state.again(name, piece, str(error))
            continue
        except Exception as error:
            piece.why = str(error) if isinstance(error, ManifestError) else f"{type(error).__name__}: {error}"
        state.end(piece)
