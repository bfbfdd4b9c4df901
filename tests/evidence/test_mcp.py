"""`xsp mcp` as a client sees it: the SDK's own client over stdio, and clients that misbehave."""

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

pytest.importorskip("mcp_types")  # of the SDK from version 2 on
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


def talk(*arguments: str, of: Callable[[Any], Awaitable[None]]) -> None:
    async def run() -> None:
        with anyio.fail_after(LONG_S):
            async with client(*arguments) as session:
                await of(session)

    anyio.run(run)


async def ask(session: Any, tool: str, **arguments: Any) -> dict[str, Any]:
    """Return a structured answer; its text is the same."""
    found = await session.call_tool(tool, arguments)
    said: dict[str, Any] = found.structured_content
    VALID.validate(said)
    assert json.loads(found.content[0].text) == said
    assert found.is_error == (said["kind"] == "error")
    return said


@pytest.mark.slow
def test_the_client_of_the_sdk_gets_all_answers(small_run: Path) -> None:
    async def of(session: Any) -> None:
        listed = (await session.list_tools()).tools
        assert [each.name for each in listed] == list(TOOLS)
        assert all(each.annotations.read_only_hint and "never instructions" in each.description for each in listed)
        summary = await ask(session, "summary")
        step = summary["statements"][0]["spans"][0]
        assert (await ask(session, "spans", id=step))["spans"][0]["kind"] == "step"
        for tool in ("runs", "health", "tables", "time", "advice"):
            assert (await ask(session, tool))["kind"] != "error"
        same = str(small_run)
        assert (await ask(session, "compare", a=same, b=same))["kind"] == "compare"
        assert (await ask(session, "summary", run="/etc/passwd"))["kind"] == "error"
        assert (await ask(session, "summary", run=3))["kind"] == "error"

    talk(str(small_run), of=of)


@pytest.mark.slow
def test_an_unknown_tool_and_a_question_that_is_too_long_are_refused_and_the_next_one_is_answered(
    small_run: Path,
) -> None:
    from mcp import MCPError

    async def of(session: Any) -> None:
        with pytest.raises(MCPError, match="there is no tool 'shell'"):
            await session.call_tool("shell", {"command": "id"})
        assert (await ask(session, "summary"))["kind"] == "summary"
        with pytest.raises(MCPError, match="at most 65,536"):
            await session.call_tool("tables", {"run": "x" * 1_000_000})
        assert (await ask(session, "summary"))["kind"] == "summary"

    talk(str(small_run), of=of)


@pytest.mark.slow
def test_questions_at_once_are_answered_each(small_run: Path) -> None:
    async def of(session: Any) -> None:
        found: dict[str, str] = {}

        async def one(analysis: str) -> None:
            found[analysis] = (await ask(session, "tables", analysis=analysis))["tables"][0]["name"]

        async with anyio.create_task_group() as tasks:
            for analysis in ("ops", "layers", "A1", "A2", "phases"):
                tasks.start_soon(one, analysis)
        assert found == {name: name for name in found}
        assert len(found) == 5

    talk(str(small_run), of=of)


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
def test_an_answer_that_takes_too_long_is_given_up_and_the_next_one_is_there(small_run: Path, sleeps: None) -> None:
    async def of(session: Any) -> None:
        late = await ask(session, "tables", analysis="sleeps")
        assert "took longer than 20 s" in late["error"]
        assert (await ask(session, "summary"))["kind"] == "summary"

    talk(str(small_run), "--seconds", "20", of=of)


@pytest.mark.slow
def test_two_hundred_questions_take_no_more_and_more_memory(small_run: Path) -> None:
    async def of(session: Any) -> None:
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

    talk(str(small_run), of=of)


def _children(pid: int) -> list[int]:
    """Return a process's children, and theirs."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((folder / "stat").read_text().rpartition(") ")[2].split()[1]) == pid:
                found += [int(folder.name), *_children(int(folder.name))]
    return found


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


def say(to: IO[str], **message: Any) -> None:
    to.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    to.flush()


def greet(process: Any) -> None:
    say(process.stdin, **HELLO)
    assert json.loads(process.stdout.readline())["result"]["serverInfo"]["name"] == "xsp"
    say(process.stdin, method="notifications/initialized")


def call(process: Any, number: int, tool: str, **arguments: Any) -> Any:
    say(process.stdin, id=number, method="tools/call", params={"name": tool, "arguments": arguments})
    while True:
        said = json.loads(process.stdout.readline())
        if said.get("id") == number:
            return said


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
def test_a_client_that_hangs_up_amid_a_question_ends_the_server_and_what_it_started(
    small_run: Path, sleeps: None
) -> None:
    with started(str(small_run)) as process:
        greet(process)
        say(process.stdin, id=1, method="tools/call", params={"name": "tables", "arguments": {"analysis": "sleeps"}})
        below = _wait_for(lambda: _children(process.pid))
        process.stdin.close()
        process.stdout.close()
        assert process.wait(LONG_S) is not None
        assert _wait_for(lambda: not any(map(_is_running, below)))


@pytest.mark.slow
@pytest.mark.parametrize("number", [deep(signal.SIGINT), signal.SIGTERM])
def test_a_signal_ends_it_quietly(small_run: Path, number: signal.Signals) -> None:
    with started(str(small_run)) as process:
        greet(process)
        call(process, 1, "summary")
        below = _children(process.pid)
        process.send_signal(number)
        said, complained = process.communicate(timeout=LONG_S)
        assert (process.returncode, said, complained) == (0, "", "")
        assert _wait_for(lambda: not any(map(_is_running, below)))


def _wait_for(found: Callable[[], Any]) -> Any:
    until = time.monotonic() + LONG_S
    while not (value := found()) and time.monotonic() < until:
        time.sleep(0.05)
    return value


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "name the runs that may be read: xsp mcp runs"),
        (["/no/such"], "/no/such: there is no such file or directory"),
        (["http://localhost:16686"], "give a path"),
        (["/", "--seconds", "0"], "--seconds must be above 0"),
        (["/", "--kib", "1"], "--kib must be from 2"),
    ],
)
def test_what_is_wrong_with_the_command_is_said_in_a_line(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["mcp", *arguments]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert why in said.err


def test_without_the_sdk_it_says_what_to_install(
    small_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] in ("mcp", "mcp_types")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mcp", None)
    assert cli.main(["mcp", str(small_run)]) == 2
    assert capsys.readouterr().err == (
        "xsp: error: xsp mcp needs the MCP SDK: pip install 'xsp[mcp]' (mcp 2 or later)\n"
    )


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["mcp", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == form.schema()
