"""Does a load of generated text measure what guidellm measures on the same server, and what the server itself saw?

The server streams the completions of a language model with weights from a seed. Both clients send it the same load in
turns: 64 tokens of prompt, 32 of output, from four users, and with Poisson arrivals. The reference of each client is
the server's own times in the same run: from the moment at which it had read a request to that at which it sent a token.
guidellm is looked for on the path (`--guidellm PATH`); without it, only xsp is compared with the server.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from parts import completions, turns

from xsp.evaluate.generation import endpoint, prompts, timing
from xsp.evaluate.load import Schedule, schedules
from xsp.evaluate.manifest import Generation, Lengths, Scenario

PROMPT, OUTPUT, USERS = 64, 32, 4
FIGURES = ("first token, median", "first token, p99", "per token, median", "tokens a second")
COLUMNS = ("load", "figure", "xsp ÷ server", "guidellm ÷ server", "xsp ÷ guidellm")

Values = Mapping[str, float]


def of_times(first_ms: Sequence[float], token_ms: Sequence[float], tokens_per_s: float) -> Values:
    """Return the figures that both clients have."""
    percentiles = [*np.percentile(first_ms, [50, 99]), np.percentile(token_ms, 50), tokens_per_s]
    return dict(zip(FIGURES, map(float, percentiles), strict=True))


def of_server(address: str) -> Values:
    """Return the figures by the server's own times."""
    times = [np.array(row) for row in completions.times_of(address)]
    seconds = (max(row[-1] for row in times) - min(row[0] for row in times)) / 1e9
    tokens = sum(len(row) - 1 for row in times)
    return of_times(
        [(row[1] - row[0]) / 1e6 for row in times], [(row[-1] - row[1]) / (len(row) - 2) / 1e6 for row in times],
        tokens / seconds,
    )  # fmt: skip


def of_xsp(address: str, rate: float | None, requests: int, seed: int) -> Values:
    """Return the figures that xsp measures."""
    generation = Generation(prompt=Lengths(mean=PROMPT), output=Lengths(mean=OUTPUT), vocabulary=256)
    schedule: Schedule = schedules.online(requests) if rate is None else schedules.poisson(rate, requests, seed)
    client = endpoint.Endpoint(f"{address}/v1", completions.NAME)
    generated = endpoint.drive_endpoint(schedule, prompts.draw(generation, requests, seed), client, users=USERS)
    client.close()
    rates = timing.figures(generated, Scenario(generation=generation))
    return of_times(
        (generated.ttft_ns / 1e6).tolist(), (generated.tpot_ns / 1e6).tolist(), rates["output_tokens_per_s"]
    )


def of_guidellm(program: str, folder: Path, address: str, rate: float | None, requests: int) -> Values:
    """Return the figures that guidellm measures; its time between tokens is a mean per request, as ours per token."""
    report = folder / "guidellm.json"
    profile = f"kind=concurrent,streams={USERS}" if rate is None else f"kind=poisson,rate={rate}"
    subprocess.run(
        [program, "run", "--backend",
         f"kind=openai_http,target={address},model={completions.NAME},request_format=/v1/completions,http2=false",
         "--profile", profile, "--constraint", f"kind=max_requests,count={requests}",
         "--tokenizer", f"kind=hf_auto,model={folder}",
         "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
         "--output", f"kind=json,path={report}", "--disable-console"],
        check=True, capture_output=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, timeout=300,
    )  # fmt: skip
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    answered = benchmark["requests"]["successful"]
    seconds = max(row["request_end_time"] for row in answered) - min(row["request_start_time"] for row in answered)
    return of_times(
        [row["time_to_first_token_ms"] for row in answered], [row["inter_token_latency_ms"] for row in answered],
        sum(row["output_tokens"] for row in answered) / seconds,
    )  # fmt: skip


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are bytes, as the server counts them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure in turns, print, save."""
    parser = turns.parser(__doc__, rounds=5)
    parser.add_argument("--guidellm", default=shutil.which("guidellm"), metavar="PATH", help="the program guidellm")
    options = turns.parse(parser, arguments)
    report = turns.Report("generation_load", "Loads of generated text: xsp and guidellm on one server", COLUMNS)
    requests = 40 if options.quick else 100
    with tempfile.TemporaryDirectory() as name, completions.served() as address:
        folder = Path(name)
        write_tokenizer(folder)
        of_xsp(address, None, 10, options.seed)
        completions.times_of(address)
        for load, rate in ((f"{USERS} users", None), ("Poisson, 6 a second", 6.0)):
            rounds: list[dict[str, float]] = []
            for number in range(options.rounds):
                turns.say(f"  {load}: round {number + 1} of {options.rounds}")
                of_client = {"xsp": of_xsp(address, rate, requests, options.seed + number)}
                of_itself = {"xsp": of_server(address)}
                if options.guidellm:
                    of_client["guidellm"] = of_guidellm(options.guidellm, folder, address, rate, requests)
                    of_itself["guidellm"] = of_server(address)
                ratios = {
                    f"{client} {figure}": value / of_itself[client][figure]
                    for client, values in of_client.items() for figure, value in values.items()
                }  # fmt: skip
                ratios |= {
                    f"both {figure}": ratios[f"xsp {figure}"] / ratios[f"guidellm {figure}"]
                    for figure in of_client.get("guidellm", {})
                }
                rounds.append(ratios)
            for figure in FIGURES:
                found = {
                    client: turns.middle([row[f"{client} {figure}"] for row in rounds])
                    for client in ("xsp", "guidellm", "both") if f"{client} {figure}" in rounds[0]
                }  # fmt: skip
                cells = [found[client].text(3) if client in found else "–" for client in ("xsp", "guidellm", "both")]
                report.add([load, figure, *cells], **found)
    report.notes += [
        "Medians over the rounds of ratios of one round. Per token: a request's time after its first token ÷ 31. "
        "Between the moment at which a request is due and that at which the server has read it, 1 ms passes.",
        "xsp ÷ guidellm is the ratio of the columns before it, since the server's speed differs between the runs, and "
        "guidellm's Poisson arrivals begin with a burst if its processes start slowly.",
        *([] if options.guidellm else ["guidellm was not found: pip install guidellm, in an environment of its own."]),
    ]
    report.finish(options)


if __name__ == "__main__":
    main()
