"""Is the right advice for planted flaws among the first three, none given to sound programs, and do gains come true?

Each program of `flaws/` is recorded with its flaw, `xsp advise` is run on it with timings of its calls, and the best
piece of advice that names the flaw is tried in turns. The programs in `SOUND` also get advice without their flaw. All
but `memory_given_back` run with an allocator that keeps free memory: otherwise every program with large tensors would
have a second flaw. Results are kept in `--out`, so that a run can be resumed.

    python benchmarks/advice.py --out /somewhere/advice          all programs
    python benchmarks/advice.py --only onednn_off one_thread     these programs
    python benchmarks/advice.py --out DIR --seconds 200          start none after 200 s; repeat until none is left
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from parts import turns

from xsp import advise
from xsp.advise import Advice, advisor, experiment, records, rerun
from xsp.comparison import commands, comparable, compare
from xsp.comparison import turns as alternation
from xsp.comparison.revisions import WorkTree as Checkout
from xsp.errors import XspError
from xsp.ingest.load import load

FLAWS = Path(__file__).with_name("flaws")
TOP_PIECES = 3
GOAL_RANKED, GOAL_FASTER, GOAL_ERROR_PERCENT = 10 / 12, 0.9, 30.0
"""Goals: share of flaws with the right advice among the first three; share of trials in which the step becomes faster;
median error in percent of the promise."""

BOUND_TOLERANCE = 1.1
"""Factor on an upper bound within which a gain counts as within the bound: repetitions differ by as much here."""

RECORDING_LIMIT_S = 900.0
"""Timeout for recording one program."""


class Flaw(NamedTuple):
    """How to recognise the right advice: one of the trials, or one of the questions and (if any) one of the words."""

    questions: tuple[str, ...]
    words: tuple[str, ...] = ()
    trials: tuple[str, ...] = ()

    def is_named_by(self, piece: Mapping[str, Any]) -> bool:
        """Return whether a piece of advice names this flaw."""
        trial = (piece.get("trial") or "").split("+")
        if any(change.partition("=")[0] in self.trials for change in trial):
            return True
        text = " ".join((piece["what"], piece["do"], *piece.get("why", ()))).lower()
        return piece["question"] in self.questions and (not self.words or any(word in text for word in self.words))


PLANTED: Mapping[str, Flaw] = {
    "onednn_off": Flaw(("choice",), ("onednn",), ("onednn",)),
    "contiguous_layout": Flaw(("choice",), ("channels",), ("channels_last",)),
    "attention_by_hand": Flaw(("removable", "fusion", "choice"), ("attention",), ("sdpa",)),
    "norm_not_folded": Flaw(("removable", "fusion"), ("norm",), ("fold_batch_norm",)),
    "optimizer_by_hand": Flaw(("fusion", "removable", "framework", "between"), ("optimizer", "foreach", "fused")),
    "optimizer_one_by_one": Flaw(("fusion", "framework"), ("optimizer", "foreach"), ("foreach", "fused_optimizer")),
    "clone_in_blocks": Flaw(("removable", "copies", "unexpected"), ("clone", "cop")),
    "casts_to_double": Flaw(("removable", "casts", "precision", "unexpected"), ("cast", "float64", "double")),
    "item_in_a_loop": Flaw(("synchronisations", "syncs", "unexpected", "removable", "calls"), ("item", "synchron")),
    "gradients_in_inference": Flaw(("gradients", "unexpected"), ("gradient", "inference_mode"), ("inference_mode",)),
    "too_many_threads": Flaw(("threads", "parallelism", "choice"), ("thread",), ("threads",)),
    "one_thread": Flaw(("threads", "parallelism", "choice"), ("thread",), ("threads",)),
    "branches_in_sequence": Flaw(("parallelism",), ("branch", "independent", "same time", "parallel")),
    "loop_over_samples": Flaw(
        ("removable", "fusion", "samples", "unexpected"), ("batch", "equal", "one call", "stack")
    ),
    "computed_twice": Flaw(("removable", "repeated"), ("twice", "equal", "same", "again")),
    "sleep_in_a_module": Flaw(("stall", "stalls", "unexpected")),
    "slow_data": Flaw(("data",)),
    "copies_to_contiguous": Flaw(("removable", "copies", "unexpected"), ("contiguous", "cop")),
    "products_in_costly_order": Flaw(("product-order",)),
    "low_rank_update": Flaw(("product-order",), ("low-rank",)),
    "edges_multiplied": Flaw(("product-order",), ("all rows once",)),
    "dense_gradient": Flaw(("dense-gradient",)),
    "generation_without_cache": Flaw(("prefix",)),
    "backbone_not_frozen": Flaw(("unused-gradients",)),
    "checkpoints_without_need": Flaw(("recomputation",)),
    "anomaly_detection_left_on": Flaw(("anomaly-detection",)),
    "one_hot_lookup": Flaw(("one-hot",)),
    "masks_made_again": Flaw(("masks",)),
    "memory_given_back": Flaw(("page-faults",)),
    "half_on_a_processor": Flaw(("half-precision", "choice", "precision"), ("float16", "float32"), ("float32",)),
    "products_by_broadcasting": Flaw(("broadcast-product",)),
    "inverse_to_multiply": Flaw(("inverse",)),
    "sort_for_a_few": Flaw(("sort-for-few",)),
    "collecting_garbage": Flaw(("between",), ("gc.collect",)),
    "heads_as_layers": Flaw(("narrow-layers",)),
    "gelu_by_hand": Flaw(("written-out", "fusion"), ("gelu",)),
    "normalised_by_hand": Flaw(("written-out", "fusion"), ("norm",)),
    "positions_made_again": Flaw(("constants",)),
    "mask_as_index": Flaw(("mask-indexing",)),
    "softmax_before_argmax": Flaw(("largest",)),
    "engine_batch_too_small": Flaw(("serving",), ("steps are full",)),
    "engine_prompts_at_once": Flaw(("serving",), ("in chunks",)),
    "engine_cache_too_small": Flaw(("serving",), ("ran full",)),
    "engine_text_decoded_again": Flaw(("serving",), ("between steps",)),
    "engine_static_batches": Flaw(("serving",), ("padding", "others of their batch")),
}
DEFAULT_ALLOCATOR = ("memory_given_back",)
"""Programs that run without `turns.KEEP_MEMORY`."""

SOUND = (
    "onednn_off", "contiguous_layout", "attention_by_hand", "norm_not_folded", "clone_in_blocks", "casts_to_double",
    "computed_twice", "loop_over_samples", "one_thread", "sleep_in_a_module", "memory_given_back",
    "half_on_a_processor", "products_by_broadcasting", "gelu_by_hand", "normalised_by_hand", "positions_made_again",
    "engine_batch_too_small", "engine_prompts_at_once", "engine_cache_too_small", "engine_text_decoded_again",
    "engine_static_batches",
)  # fmt: skip
"""Programs for which there should be no advice without their flaw."""

QUICK = ("onednn_off", "clone_in_blocks", "sleep_in_a_module")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = turns.parser(__doc__)
    parser.add_argument("--out", type=Path, help="keep runs, timings and answers there, and continue from them")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=sorted(PLANTED), help="programs of flaws/")
    parser.add_argument(
        "--fill", type=float, help="seconds per program for timings of its calls (default: 60, quick: 5)"
    )
    parser.add_argument("--turns", type=int, help="maximum turns of a trial (default: 8, quick: 3)")
    parser.add_argument(
        "--seconds", type=float, help="start no further program after this time; with --out, run it again"
    )
    parser.add_argument("--no-try", action="store_true", help="only ask for advice")
    options = turns.parse(parser, arguments)
    names = tuple(options.only or (QUICK if options.quick else PLANTED))
    os.environ.update(turns.KEEP_MEMORY)  # inherited by all subprocesses: programs, trials, timings of calls
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        programs = [*names, *(f"{name} --mended" for name in names if name in SOUND)]
        deadline = math.inf if options.seconds is None else time.monotonic() + options.seconds
        answers: dict[str, dict[str, Any]] = {}
        interrupted = False
        try:
            for text in programs:
                if time.monotonic() < deadline or _path(text, out).exists():
                    answers[text] = _answer(text, out, options)
            for name in names:
                if name in answers and time.monotonic() < deadline and not options.no_try:
                    answers[name] = _with_mended(name, answers[name], out, options)
        except KeyboardInterrupt:
            interrupted = True
    flawed = {text: answer for text, answer in answers.items() if " " not in text}
    clean = {text.split()[0]: answer for text, answer in answers.items() if " " in text}
    report = _report(flawed, clean, options)
    if interrupted:
        report.mark_partial("interrupted: the figures are of what was measured before")
    if remaining := len(programs) - len(answers):
        report.notes.append(f"{remaining} of {len(programs)} programs are left: run it again with the same --out")
    report.finish(options)


def _path(text: str, out: Path) -> Path:
    """Return the path of the stored answer for a program."""
    name, *mended = text.split()
    return out / "-".join([name, *(option.strip("-") for option in mended)]) / "answer.json"


def _steps(options: argparse.Namespace) -> str:
    return "20" if options.quick else "120"


def _answer(text: str, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the answer for one program, from the folder if it is stored there."""
    name, *mended = text.split()
    path = _path(text, out)
    place = path.parent
    answer: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        answer = json.loads(path.read_text(encoding="utf-8"))
    if not answer:
        turns.say(f"  {text}")
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        try:
            with _default_allocator(name):
                answer = _record_and_advise(name, mended, place, out / "timings", options)
        except (XspError, subprocess.SubprocessError) as error:
            answer = {"error": next(iter(str(error).splitlines()), "") or type(error).__name__}
        path.write_text(json.dumps(answer), encoding="utf-8")
    return answer


def _with_mended(name: str, answer: dict[str, Any], out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return an answer with the gain from mending the flaw, if advice named the flaw and no trial measured the gain."""
    if "rank" in answer and "mended" not in answer and not _measured_gain(answer):
        turns.say(f"  {name}, without its flaw")
        path = _path(name, out)
        with _default_allocator(name):
            mended = _mending_gain(answer["advice"][answer["rank"] - 1], FLAWS / f"{name}.py", path.parent, options)
        answer = {**answer, "mended": mended}
        path.write_text(json.dumps(answer), encoding="utf-8")
    return answer


def _record_and_advise(
    name: str, mended: Sequence[str], place: Path, timings: Path, options: argparse.Namespace
) -> dict[str, Any]:
    script = FLAWS / f"{name}.py"
    run = place / "run"
    environment = {**os.environ, "STEPS": _steps(options)}
    command = [sys.executable, "-m", "xsp.cli", "run", "--quiet", "--out", str(run), str(script), *mended]
    subprocess.run(command, check=True, timeout=RECORDING_LIMIT_S, env=environment, stdout=subprocess.DEVNULL)
    fill = options.fill if options.fill is not None else 5.0 if options.quick else 60.0
    context = advisor.context_of(str(run), {"fill": fill, "timings": timings} if fill else {"timings": timings})
    result = advise.of(context)
    pieces = [_plain(piece) for piece in result.advice]
    answer: dict[str, Any] = {"advice": pieces, "unanswered": dict(result.unanswered)}
    match = next((index for index, piece in enumerate(pieces) if PLANTED[name].is_named_by(piece)), None)
    if mended or match is None:
        return answer
    answer["rank"] = match + 1
    piece = result.advice[match]
    if piece.trial and not options.no_try:
        answer["tried"] = _try_advice(piece, script, place, environment, options)
    return answer


def _try_advice(
    piece: Advice, script: Path, place: Path, environment: Mapping[str, str], options: argparse.Namespace
) -> dict[str, Any]:
    run = load(place / "run").run
    command = f"STEPS={environment['STEPS']} python {script}"
    program = rerun.program(run, str(place / "run"), command)
    trains = any(kind.training for kind in run.kinds)
    plan = experiment.TrialPlan(
        program, place / "trials", trains, options.turns or (3 if options.quick else 8), options.seed
    )
    (outcome,) = experiment.run_trials(plan, [piece], lambda *_: None)
    return records.plain(outcome)


def _mending_gain(piece: Mapping[str, Any], script: Path, place: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the gain of a program from mending its flaw by hand, where no trial applies the change."""
    command = f"STEPS={_steps(options)} python {script}"
    recording = alternation.ComparedTurns(place / "mended", options.turns or (3 if options.quick else 8))
    sides = [
        alternation.ComparedSide(letter, commands.program(text), Checkout(Path.cwd()))
        for letter, text in (("a", command), ("b", f"{command} --mended"))
    ]
    try:
        alternation.run_turns(sides, recording, "M", lambda *_: None, seed=options.seed, overwrite=True)
        step = compare(*comparable.load(recording.a, recording.b), turns=recording.max_turns).step
    except XspError as error:
        return {"reason": str(error).splitlines()[0]}
    if not step.a_ms or step.change_ms is None:
        return {"reason": step.verdict}
    measured_percent = -100 * step.change_ms / step.a_ms
    promised = piece["of_step_percent"]
    error_percent = None if piece["at_most"] or not promised else 100 * abs(measured_percent / promised - 1)
    return {
        "before_ms": step.a_ms, "after_ms": step.b_ms, "turns": len(recording.a),
        "real_percent": measured_percent, "off_percent": error_percent,
        "came_true": measured_percent > 0, "at_most": piece["at_most"], "promised_percent": promised,
    }  # fmt: skip


@contextlib.contextmanager
def _default_allocator(name: str) -> Iterator[None]:
    """Remove `turns.KEEP_MEMORY` from the environment in the block, for a program in `DEFAULT_ALLOCATOR`."""
    removed = {key: os.environ.pop(key) for key in turns.KEEP_MEMORY if name in DEFAULT_ALLOCATOR}
    try:
        yield
    finally:
        os.environ.update(removed)


def _plain(piece: Advice) -> dict[str, Any]:
    gain = {"low": piece.gain.low, "value": piece.gain.value, "high": piece.gain.high}
    names = ("question", "what", "why", "do", "trial", "at_most", "of_step_percent", "changes_numbers", "option")
    return {"gain_ms": gain, **{name: getattr(piece, name) for name in names}}


def _report(
    flawed: Mapping[str, dict[str, Any]], clean: Mapping[str, dict[str, Any]], options: argparse.Namespace
) -> turns.Report:
    report = turns.Report(
        "advice",
        f"Planted flaws: {len(flawed)} programs, and {len(clean)} without a flaw",
        ("program", "rank", "first piece", "promised", "gained", "error", "how"),
    )
    for name, answer in flawed.items():
        report.add(_row(name, answer), **answer)
    for name, answer in clean.items():
        pieces = answer.get("advice", ())
        first_piece = f"{pieces[0]['question']}, {pieces[0]['of_step_percent']:.0f} %" if pieces else "none"
        report.add([f"{name} --mended", "–", answer.get("error", first_piece)[:40], "–", "–", "–", "–"], **answer)
    report.notes += _notes(flawed, clean)
    return report


def _row(name: str, answer: Mapping[str, Any]) -> list[str]:
    pieces, rank, tried = answer.get("advice", ()), answer.get("rank"), _measured_gain(answer)
    first_piece = f"{pieces[0]['question']}, {pieces[0]['of_step_percent']:.0f} %" if pieces else "none"
    match = pieces[rank - 1] if rank else None
    promised = f"{'at most ' if match['at_most'] else ''}{match['of_step_percent']:.0f} %" if match else "–"
    gained = f"{tried['real_percent']:.0f} %" if tried.get("real_percent") is not None else tried.get("outcome", "–")
    error = f"{tried['off_percent']:.0f} %" if tried.get("off_percent") is not None else "–"
    trial = (
        (answer.get("tried") or {}).get("trial", "") if tried is answer.get("tried") else "by hand" if tried else "–"
    )
    return [name, str(rank or "–"), answer.get("error", first_piece)[:40], promised, gained, error, trial]


def _measured_gain(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the measured gain: of a trial, else of mending the flaw by hand; empty if neither was measured."""
    candidates = [answer.get("tried") or {}, answer.get("mended") or {}]
    return next((candidate for candidate in candidates if candidate.get("real_percent") is not None), {})


def _faults(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the pieces that report a flaw; an option (bfloat16 for float32) does not."""
    return [piece for piece in answer.get("advice", ()) if not piece.get("option")]


def _notes(flawed: Mapping[str, dict[str, Any]], clean: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return notes that compare the figures with the goals."""
    ranked = [name for name, answer in flawed.items() if (answer.get("rank") or TOP_PIECES + 1) <= TOP_PIECES]
    silent_programs = [name for name, answer in clean.items() if "error" not in answer and not _faults(answer)]
    tried = [gain for answer in flawed.values() if (gain := _measured_gain(answer))]
    gain_errors = [gain["off_percent"] for gain in tried if gain["off_percent"] is not None]
    bounds = [gain for gain in tried if gain["at_most"]]
    notes = [
        f"right advice among the first {TOP_PIECES} pieces: {len(ranked)} of {len(flawed)} (goal {GOAL_RANKED:.0%})",
        f"no advice for programs without a flaw: {len(silent_programs)} of {len(clean)} (goal: all)",
    ]
    if tried:
        faster = sum(gain["came_true"] for gain in tried)
        notes.append(f"step faster with the change: {faster} of {len(tried)} (goal {GOAL_FASTER:.0%})")
        within_bound = sum(gain["real_percent"] <= BOUND_TOLERANCE * gain["promised_percent"] for gain in bounds)
        notes.append(f"gains within {BOUND_TOLERANCE:g} times their upper bound: {within_bound} of {len(bounds)}")
    if gain_errors:
        notes.append(
            f"error of the predicted gain: {statistics.median(gain_errors):.0f} % "
            f"(median, goal {GOAL_ERROR_PERCENT:.0f} %)"
        )
    errors = [name for name, answer in (*flawed.items(), *clean.items()) if "error" in answer]
    return [*notes, *([f"no answer for: {', '.join(errors)}"] if errors else [])]


if __name__ == "__main__":
    main()
