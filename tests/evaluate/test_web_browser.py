"""The pages of evaluations in a real browser."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("yaml")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("torch")

from xsp.evaluate.agents import Agent
from xsp.evaluate.transports import SubprocessAgent
from xsp.evaluate.web import app

pytestmark = pytest.mark.browser

WAIT_S = 240


@contextlib.contextmanager
def serving(store: Path, there: Sequence[Agent] | None = None) -> Iterator[str]:
    listening = socket.create_server(("127.0.0.1", 0))
    server = app.server(store, "127.0.0.1", 0, there)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(60)
    listening.close()
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a server of an empty folder."""
    with serving(tmp_path_factory.mktemp("served") / "evaluations") as address:
        yield address


def until(browser: Any, script: str) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, WAIT_S, 0.1).until(lambda _: browser.execute_script(script))


def fill(browser: Any, name: str, text: str) -> None:
    browser.execute_script("arguments[0].value = arguments[1]", browser.find_element("name", name), text)


def evaluated(browser: Any, served: str, requests: int, levels: str) -> str:
    """Make an evaluation from the form, watch it, and return the name of its result."""
    browser.get(served + "/new")
    until(browser, "return document.getElementById('evaluate')")
    fill(browser, "model.source", "micro:depth-1")
    fill(browser, "scenario.requests", str(requests))
    fill(browser, "software.threads", "1")
    browser.execute_script("document.getElementById('trace').value = arguments[0]", levels)
    browser.find_element("id", "evaluate").click()
    until(browser, "return location.pathname.startsWith('/jobs/')")
    result = until(
        browser,
        "return document.getElementById('result')?.textContent !== undefined"
        " && document.getElementById('state').textContent || document.querySelector('.error')?.textContent",
    )
    assert result == "done"
    browser.execute_script("document.getElementById('result').click()")
    until(browser, "return document.querySelectorAll('.chart canvas').length >= 2")
    return str(browser.current_url.rpartition("/")[2])


def test_an_evaluation_is_made_from_the_form_watched_opened_and_compared(browser: Any, served: str) -> None:
    names = [evaluated(browser, served, 20, "M/L"), evaluated(browser, served, 30, "")]
    browser.get(f"{served}/evaluations/{names[0]}/report")
    assert until(browser, "return document.getElementById('timeline-chart') !== null")
    browser.get(served + "/")
    until(browser, "return document.querySelectorAll('td input[type=checkbox]').length === 2")
    browser.execute_script(
        "const by = document.querySelector('[aria-label=\"order of the leaderboard\"]');"
        "by.value = 'p90_ms'; by.dispatchEvent(new Event('change'))"
    )
    heads = "[...document.querySelectorAll('[aria-label=leaderboard] th')].map((each) => each.textContent)"
    until(browser, f"return {heads}.includes('p90 ms')")
    for box in browser.find_elements("css selector", "td input[type=checkbox]"):
        box.click()
    browser.find_element("id", "compare").click()
    until(browser, "return document.querySelector('.chart canvas')")
    said = browser.find_element("id", "main").text
    assert all(name in said for name in names)
    assert "outputs: equal bit for bit" in said
    assert "manifest scenario.requests" in said
    assert [each for each in browser.get_log("browser") if each["level"] == "SEVERE"] == []
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
    assert all(each.startswith((served, "data:")) for each in loaded)


def test_what_is_wrong_is_said_on_the_page(browser: Any, served: str) -> None:
    browser.get(served + "/new")
    until(browser, "return document.getElementById('evaluate')")
    fill(browser, "model.source", "evil.py:build")
    browser.find_element("id", "evaluate").click()
    assert "no file is read" in until(browser, "return document.querySelector('.error')?.textContent")
    browser.get(served + "/evaluations/0123456789ab-0001")
    assert "no such evaluation" in until(browser, "return document.querySelector('.error')?.textContent")


def test_of_several_agents_one_is_chosen_on_the_form(browser: Any, tmp_path: Path) -> None:
    there = [SubprocessAgent(name, {"rack": name[0]}) for name in ("left", "right")]
    with serving(tmp_path / "evaluations", there) as served:
        browser.get(served + "/new")
        until(browser, "return document.getElementById('evaluate')")
        offered = browser.find_element("id", "agent")
        assert offered.is_displayed()
        assert offered.text.split("\n") == ["any agent that satisfies it", "by left", "by right"]
        fill(browser, "scenario.requests", "5")
        browser.execute_script("document.getElementById('agent').value = 'right'")
        browser.find_element("id", "evaluate").click()
        until(browser, "return document.getElementById('result')")
        assert "agent right" in browser.find_element("id", "main").text.replace("\n", " ")
        browser.execute_script("document.getElementById('result').click()")
        until(browser, "return document.querySelector('.chart canvas')")
        assert "right: " in browser.find_element("id", "main").text

        browser.get(served + "/new")
        until(browser, "return document.getElementById('evaluate')")
        [yaml] = (each for each in browser.find_elements("tag name", "button") if each.text == "edit as YAML")
        yaml.click()
        until(browser, "return document.getElementById('yaml').value")
        browser.execute_script(
            "const yaml = document.getElementById('yaml'); yaml.value += '\\nhardware: {labels: {rack: l}}\\n';"
            "document.getElementById('agent').value = 'right'"
        )
        browser.find_element("id", "evaluate").click()
        said = until(browser, "return document.querySelector('.error')?.textContent")
        assert "agent right does not satisfy the manifest" in said
        assert "rack" in said
