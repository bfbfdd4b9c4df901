"""The report's page in a real browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from test_report import FULL, HOSTILE, trace

from xsp.report import html
from xsp.span import Level
from xsp.testing import spans, trace_of

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--window-size=1280,900",
        "--disable-component-update", f"--user-data-dir={tmp_path_factory.mktemp('browser')}",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory) -> Any:
    path = html.write(trace(*FULL), tmp_path_factory.mktemp("page") / "page.html")
    browser.get(path.as_uri())
    return browser


def test_it_opens_without_an_error_and_without_a_request(page):
    assert page.get_log("browser") == []
    loaded = page.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
    assert loaded == []
    assert page.execute_script("return document.body.scrollWidth <= innerWidth")


def test_names_are_text_and_run_nothing(page):
    assert page.execute_script("return window.hacked") is None
    assert page.find_element("id", "name").text == HOSTILE


def test_charts_are_drawn(page):
    painted = page.execute_script("""
        return [...document.querySelectorAll('.chart canvas')].map(canvas =>
            canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(value => value))
    """)
    assert len(painted) >= 4
    assert all(painted)


def test_the_timeline_zooms_and_tells_what_is_known_of_a_span(page):
    assert page.execute_script("return window.xspTimeline.boxes") == 8
    page.execute_script("window.xspZoom(60, 70)")
    assert page.execute_script("return window.xspTimeline.boxes") < 8
    page.execute_script("window.xspZoom(0, 100); window.xspShow(0)")
    panel = page.find_element("id", "panel").text
    assert "95 % interval" in panel
    assert "true" in panel


def test_a_click_on_a_span_fills_the_panel(page):
    from selenium.webdriver.common.action_chains import ActionChains

    page.execute_script("document.getElementById('panel').replaceChildren()")
    chart = page.find_element("id", "timeline-chart")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    ActionChains(page).move_to_element_with_offset(chart, 0, -chart.size["height"] // 2 + 20).click().perform()
    assert page.find_element("id", "panel").text != ""


def test_a_table_sorts_by_a_click_and_filters(page):
    details = page.find_element("id", "table-A2")
    page.execute_script("arguments[0].open = true", details)
    cells = "return [...arguments[0].querySelectorAll('tbody tr')].map(row => row.cells[0].textContent)"
    page.implicitly_wait(2)
    button = next(each for each in details.find_elements("css selector", "th button") if each.text == "layer_index")
    page.execute_script("arguments[0].click()", button)
    assert page.execute_script(cells, details) == ["2", "1", "0"]
    page.execute_script("arguments[0].click()", button)
    assert page.execute_script(cells, details) == ["0", "1", "2"]
    details.find_element("css selector", "input").send_keys("Conv2d")
    assert page.execute_script(cells, details) == ["1"]


def test_of_fifty_thousand_spans_few_boxes_are_drawn(browser, tmp_path):
    lines = ["step net 0-50001"] + [f"op aten::add {place + 0.2}-{place + 0.8}" for place in range(49_999)]
    rows = [row._replace(step=0, rung=int(Level.OP)) for row in spans("\n".join(lines))]
    page = html.write(trace_of(rows, {"name": "long"}), tmp_path / "long.html")
    browser.get(page.as_uri())
    assert 0 < browser.execute_script("return window.xspTimeline.boxes") < 2000
    browser.execute_script("window.xspZoom(50, 50.1)")
    assert browser.execute_script("return window.xspTimeline.boxes") < 2000
