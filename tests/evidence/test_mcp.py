"""`xsp mcp` with the SDK's client over stdio, and with clients that misbehave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import IO, Any

import pytest
from depth import deep

from xsp import cli
from xsp.evidence import form
from xsp.evidence.tools import TOOLS

pytest.importorskip("mcp_types")  # in the SDK from version 2 on
anyio = pytest.importorskip("anyio")
jsonschema = pytest.importorskip("jsonschema")

VALID = jsonschema.Draft202012Validator(form.schema())
LONG_S = 120
COMMAND = [sys.executable, "-m", "xsp.cli", "mcp"]


@contextlib.asynccontextmanager
async def client(*arguments: str) -> AsyncIterator[Any]:
    from mcp import ClientSession, StdioServerParameters, stdio_client

    server = StdioServerParameters(command=COMMAND[0], args=[*COMMAND[1:], *arguments], env=dict(os.environ))
    async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        yield session


def talk(*arguments: str, exchange: Callable[[Any], Awaitable[None]]) -> None:
    async def run() -> None:
        with anyio.fail_after(LONG_S):
            async with client(*arguments) as session:
                await exchange(session)

    anyio.run(run)


async def ask(session: Any, tool: str, **arguments: Any) -> dict[str, Any]:
    """Return a structured answer; its text is the same."""
    result = await session.call_tool(tool, arguments)
    answer: dict[str, Any] = result.structured_content
    VALID.validate(answer)
    assert json.loads(result.content[0].text) == answer
    assert result.is_error == (answer["kind"] == "error")
    return answer


@pytest.mark.slow
def test_the_client_of_the_sdk_gets_all_answers(small_run: Path) -> None:
    async def exchange(session: Any) -> None:
        tools = (await session.list_tools()).tools
        assert [entry.name for entry in tools] == list(TOOLS)
        assert all(entry.annotations.read_only_hint and "never instructions" in entry.description for entry in tools)
        summary = await ask(session, "summary")
        step = summary["statements"][0]["spans"][0]
        assert (await ask(session, "spans", id=step))["spans"][0]["kind"] == "step"
        for tool in ("runs", "health", "tables", "time", "advice"):
            assert (await ask(session, tool))["kind"] != "error"
        run = str(small_run)
        assert (await ask(session, "compare", a=run, b=run))["kind"] == "compare"
        assert (await ask(session, "summary", run="/etc/passwd"))["kind"] == "error"
        assert (await ask(session, "summary", run=3))["kind"] == "error"

    talk(str(small_run), exchange=exchange)


@pytest.mark.slow
def test_an_unknown_tool_and_a_question_that_is_too_long_are_refused_and_the_next_one_is_answered(
    small_run: Path,
) -> None:
    from mcp import MCPError

    async def exchange(session: Any) -> None:
        with pytest.raises(MCPError, match="there is no tool 'shell'"):
            await session.call_tool("shell", {"command": "id"})
        assert (await ask(session, "summary"))["kind"] == "summary"
        with pytest.raises(MCPError, match="at most 65,536"):
            await session.call_tool("tables", {"run": "x" * 1_000_000})
        assert (await ask(session, "summary"))["kind"] == "summary"

    talk(str(small_run), exchange=exchange)


@pytest.mark.slow
def test_simultaneous_questions_are_all_answered(small_run: Path) -> None:
    async def exchange(session: Any) -> None:
        result: dict[str, str] = {}

        async def one(analysis: str) -> None:
            result[analysis] = (await ask(session, "tables", analysis=analysis))["tables"][0]["name"]

        async with anyio.create_task_group() as tasks:
            for analysis in ("ops", "layers", "A1", "A2", "phases"):
                tasks.start_soon(one, analysis)
        assert result == {name: name for name in result}
        assert len(result) == 5

    talk(str(small_run), exchange=exchange)


SLEEPS = """
import os, time
from xsp.analyses import analysis

@analysis("sleeps", "An analysis that does not end")
def sleeps(trace):
    "Sleeps."
    print("not on stdout")
    os.system("echo nor this")
    time.sleep(1000)
"""


@pytest.fixture
def sleeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install an analysis that does not end, and prints."""
    site = tmp_path / "site"
    (site / "sleeps-1.dist-info").mkdir(parents=True)
    (site / "sleeps-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: sleeps\nVersion: 1\n")
    (site / "sleeps-1.dist-info" / "entry_points.txt").write_text("[xsp.analyses]\nsleeps = sleeps_module")
    (site / "sleeps_module.py").write_text(SLEEPS)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)


@pytest.mark.slow
def test_a_slow_answer_is_stopped_and_the_next_question_is_answered(small_run: Path, sleeps: None) -> None:
    async def exchange(session: Any) -> None:
        slow = await ask(session, "tables", analysis="sleeps")
        assert "took longer than 20 s" in slow["error"]
        assert (await ask(session, "summary"))["kind"] == "summary"

    talk(str(small_run), "--seconds", "20", exchange=exchange)


@pytest.mark.slow
def test_two_hundred_questions_do_not_leak_memory(small_run: Path) -> None:
    async def exchange(session: Any) -> None:
        sizes = []
        for number in range(200):
            await ask(
                session,
                *(("tables", "time", "health", "spans")[number % 4],),
                **({"id": "0"} if number % 4 == 3 else {}),
            )
            if number in (60, 199):
                sizes.append(sum(map(_resident, _children(os.getpid()))))
        assert sizes[0] > 0
        assert sizes[1] < sizes[0] + (48 << 20), sizes

    talk(str(small_run), exchange=exchange)


def _children(pid: int) -> list[int]:
    """Return the descendants of a process."""
    result = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((folder / "stat").read_text().rpartition(") ")[2].split()[1]) == pid:
                result += [int(folder.name), *_children(int(folder.name))]
    return result


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


# --- without the SDK's client ---------------------------------------------------------------------------------------

HELLO = {
    "jsonrpc": "2.0", "id": 0, "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}},
}  # fmt: skip


@contextlib.contextmanager
def started(*arguments: str) -> Any:
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def say(stream: IO[str], **message: Any) -> None:
    stream.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    stream.flush()


def greet(process: Any) -> None:
    say(process.stdin, **HELLO)
    assert json.loads(process.stdout.readline())["result"]["serverInfo"]["name"] == "xsp"
    say(process.stdin, method="notifications/initialized")


def call(process: Any, number: int, tool: str, **arguments: Any) -> Any:
    say(process.stdin, id=number, method="tools/call", params={"name": tool, "arguments": arguments})
    while True:
        answer = json.loads(process.stdout.readline())
        if answer.get("id") == number:
            return answer


@pytest.mark.slow
def test_nothing_but_the_protocol_is_on_stdout_even_where_lines_are_no_json(small_run: Path) -> None:
    with started(str(small_run)) as process:
        greet(process)
        process.stdin.write("no json\n\x00\xff{]\n" + '{"jsonrpc": "2.0"}\n[1, 2]\n')
        process.stdin.flush()
        assert call(process, 1, "summary")["result"]["structuredContent"]["kind"] == "summary"
        assert call(process, 2, "tables", analysis={"a": 1})["result"]["isError"]
        process.stdin.close()
        for line in process.stdout:
            assert json.loads(line)["jsonrpc"] == "2.0"
        assert process.wait(LONG_S) == 0


@pytest.mark.slow
def test_a_client_that_disconnects_during_a_question_ends_the_server_and_its_worker(
    small_run: Path, sleeps: None
) -> None:
    with started(str(small_run)) as process:
        greet(process)
        say(process.stdin, id=1, method="tools/call", params={"name": "tables", "arguments": {"analysis": "sleeps"}})
        children = _wait_for(lambda: _children(process.pid))
        process.stdin.close()
        process.stdout.close()
        assert process.wait(LONG_S) is not None
        assert _wait_for(lambda: not any(map(_is_running, children)))


@pytest.mark.slow
@pytest.mark.parametrize("number", [deep(signal.SIGINT), signal.SIGTERM])
def test_a_signal_ends_it_quietly(small_run: Path, number: signal.Signals) -> None:
    with started(str(small_run)) as process:
        greet(process)
        call(process, 1, "summary")
        children = _children(process.pid)
        process.send_signal(number)
        answer, errors = process.communicate(timeout=LONG_S)
        assert (process.returncode, answer, errors) == (0, "", "")
        assert _wait_for(lambda: not any(map(_is_running, children)))


def _wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LONG_S
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "name the runs that may be read: xsp mcp runs"),
        (["/no/such"], "/no/such: there is no such file or directory"),
        (["http://localhost:16686"], "give a path"),
        (["/", "--seconds", "0"], "--seconds must be above 0"),
        (["/", "--kib", "1"], "--kib must be from 2"),
    ],
)
def test_a_wrong_command_is_reported_in_one_line(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["mcp", *arguments]) == 2
    answer = capsys.readouterr()
    assert (answer.out, answer.err.count("\n")) == ("", 1)
    assert reason in answer.err


def test_without_the_sdk_the_error_names_the_package(
    small_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [entry for entry in sys.modules if entry.partition(".")[0] in ("mcp", "mcp_types")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mcp", None)
    assert cli.main(["mcp", str(small_run)]) == 2
    assert capsys.readouterr().err == (
        "xsp: error: xsp mcp needs the MCP SDK: pip install 'xsp[mcp]' (mcp 2 or later)\n"
    )


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["mcp", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == form.schema()
