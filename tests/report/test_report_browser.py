"""The report's page in a real browser."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import pytest
from devicetrace import generated
from test_report import FULL, HOSTILE, STEP, looped, trace
from test_security import HOSTILE as NAMES
from test_security import hostile_trace

from xsp import rundir, sections
from xsp.report import html
from xsp.schema import Level
from xsp.sections import Branch, Chart, Section, Series, Table, Text, Tree
from xsp.testing import spans, trace_of

pytestmark = pytest.mark.browser

FULL_SECTION = Section(
    "Bound",
    (
        Table(("rung", "ms"), (("best", 4.4), ("as run", None)), "The ladder"),
        Chart("bars", "Rungs", "ms", ("best", HOSTILE), (Series("step", (4.4, None), (4.0, None), (4.9, None)),)),
        Chart("points", "FLOPs", "ms", (1e9, 2e9), (Series(HOSTILE, (1.0, 2.5)),), "FLOPs", ("at",), ("a", HOSTILE)),
        Tree(("ms",), (Branch("layer1", (2.0,), True, (Branch("conv", (None,)),)),), "Modules", "on the longest path"),
    ),
)


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
        plots.forEach(each => each.draw());
        return [...document.querySelectorAll('.chart canvas')].map(canvas =>
            canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(value => value))
    """)
    assert len(painted) >= 4
    assert all(painted)


def test_the_ledger_says_what_it_adds_up_to(page):
    assert page.find_element("id", "ledger-sum").text == (
        "0.1000 ms true + 0 ms (layers) + 0 ms (operators) + 0 ms (kernels) = 0.1000 ms; "
        "with all levels recorded, 0.1000 ms were measured."
    )
    assert page.execute_script("return [12.5, 544046.5, 0.25, null, true, 70599].map(number)") == (
        ["12.50", "544,047", "0.2500", "–", "yes", "70,599"]
    )


def seen(page) -> dict[str, Any]:
    """Return what the timeline shows: from, to, and its boxes with their places on the canvas."""
    return page.execute_async_script(
        "const done = arguments[0]; const finish = () => done(timeline.visibleState());"
        "requestAnimationFrame(() => requestAnimationFrame(finish))"
    )


def pointer(page, x: float, y: float) -> Any:
    """Return a pointer that stands on a place of the timeline's canvas."""
    from selenium.webdriver.common.action_chains import ActionChains

    canvas = page.find_element("id", "spans")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    middle = (canvas.size["width"] / 2, canvas.size["height"] / 2)
    return ActionChains(page).move_to_element_with_offset(canvas, round(x - middle[0]), round(y - middle[1]))


def wheel(page, x: float, y: float, delta: int) -> None:
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

    canvas = page.find_element("id", "spans")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    aside, below = round(x - canvas.size["width"] / 2), round(y - canvas.size["height"] / 2)
    pointer(page, x, y).scroll_from_origin(ScrollOrigin.from_element(canvas, aside, below), 0, delta).perform()


def test_a_click_on_a_span_tells_what_is_known_of_it(page):
    hostile = next(box for box in seen(page)["boxes"] if box["name"] == HOSTILE)
    pointer(page, hostile["x"], hostile["y"]).click().perform()
    panel = page.find_element("id", "panel")
    assert panel.find_element("tag name", "h3").text == HOSTILE
    for word in ("recorded", "averaged", "true", "95 % interval", "difference", "found by", "containment"):
        assert word in panel.text
    assert page.execute_script("return window.hacked") is None


def test_the_wheel_zooms_and_dragging_pans(page):
    whole = seen(page)
    layer = next(box for box in whole["boxes"] if box["name"] == "layer1")
    page.execute_script("scrollTo(0, 0)")
    wheel(page, layer["x"], layer["y"], -600)
    near = seen(page)
    assert near["to"] - near["from"] < 0.7 * (whole["to"] - whole["from"])
    there = page.execute_script("return (arguments[0] - timeline.gutter) / timeline.width", layer["x"])
    at = whole["from"] + there * (whole["to"] - whole["from"])
    assert near["from"] < at < near["to"]
    pointer(page, 300, 30).click_and_hold().move_by_offset(-60, 0).release().perform()
    aside = seen(page)
    assert aside["from"] > near["from"]
    assert aside["to"] - aside["from"] == pytest.approx(near["to"] - near["from"])
    page.find_element("id", "all").click()
    assert seen(page)["boxes"] == whole["boxes"]


def test_keys_zoom_and_pan(page):
    whole = seen(page)
    canvas = page.find_element("id", "spans")
    canvas.send_keys("++")
    near = seen(page)
    assert near["to"] - near["from"] < whole["to"] - whole["from"]
    canvas.send_keys("0")
    assert seen(page)["to"] == whole["to"]


def test_spans_are_found_by_name(page):
    field = page.find_element("id", "find")
    field.send_keys("conv2d")
    assert page.find_element("id", "found").text == "2 spans, 76 µs together"
    assert {box["name"] for box in seen(page)["boxes"] if box["hit"]} == {"layer1", "aten::conv2d"}
    field.clear()
    field.send_keys(" ")
    assert all(box["hit"] for box in seen(page)["boxes"])


def test_found_spans_stand_out_and_the_others_fade(page):
    page.find_element("id", "all").click()
    page.find_element("id", "find").send_keys("addmm")
    shown = seen(page)
    found = next(box for box in shown["boxes"] if box["hit"])
    other = next(box for box in shown["boxes"] if box["name"] == "aten::conv2d")
    faint = page.execute_script(
        "const canvas = timeline.canvas, dot = devicePixelRatio, reading = {willReadFrequently: true};"
        "const colours = (word) => { timeline.find(word); timeline.draw();"
        "  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d', reading);"
        "  copy.drawImage(canvas, 0, 0);"
        "  return arguments[0].map(({x, y}) => [...copy.getImageData(x * dot, (y - 8) * dot, 1, 1).data]); };"
        "return [colours(''), colours('addmm')]",
        [found, other],
    )
    (found_before, other_before), (found_after, other_after) = faint
    assert found_after == found_before
    assert other_before[3] == 255
    assert other_after[3] < 50
    page.find_element("id", "find").clear()
    page.find_element("id", "find").send_keys(" ")


def test_a_lane_is_named_by_what_it_holds(page):
    words = page.execute_script("return [[20], [30, 40], [30, 40, 50], [45]].map(levelWords)")
    assert words == ["model", "layers, operators", "layers to libraries", "level 45"]
    assert page.execute_script("return timeline.rows.map((_, row) => timeline.title(row))") == [
        ["thread 1", "model"], ["", "model"], ["", "layers"], ["", "layers"], ["", "operators"], ["", "libraries"],
    ]  # fmt: skip


def linked(page, fragment: str) -> str:
    """Follow a link to a place of the page and return what the page says to it."""
    page.execute_async_script(
        "addEventListener('hashchange', () => arguments[1](), {once: true}); location.hash = arguments[0]", fragment
    )
    return page.find_element("id", "linked").text


def test_marks_of_the_ruler_end_however_far_from_zero_they_are(page):
    assert 0 < page.execute_script("return ticks(1.7e18, 1.7e18 + 256, 1000).length") < 100
    marks = page.execute_script("return ticks(0, 1e6, 440).map(([at, text]) => text)")
    assert marks == ["0.0 ms", "0.5 ms", "1.0 ms"]


def test_a_link_leads_to_the_span_of_its_key(page):
    place = page.execute_script(
        "return timeline.spans.places(place => timeline.get.name(place) === arguments[0])[0]", HOSTILE
    )
    key = page.execute_script("return timeline.get.key(arguments[0])", place)
    page.find_element("id", "all").click()
    assert linked(page, f"key={key}") == ""
    near = seen(page)
    assert near["to"] - near["from"] == pytest.approx(2 * 35_000)
    assert page.find_element("css selector", "#panel h3").text == HOSTILE
    assert key in page.find_element("id", "panel").text


@pytest.mark.parametrize("key", ["0123456789abcdef", "%3Cscript%3Ewindow.hacked%3D1%3C/script%3E", ""])
def test_a_link_to_a_span_that_is_not_there_says_so(page, key):
    said = linked(page, f"key={key}")
    assert said.startswith(f"The link leads to a span with the key {unquote(key)}")
    assert "the timeline shows none" in said
    assert page.execute_script("return window.hacked") is None
    assert linked(page, "charts") == ""


def test_a_page_opens_at_the_span_that_a_link_names(browser, tmp_path):
    path = html.write(trace(*FULL), tmp_path / "page.html")
    key = trace(*FULL).sql("SELECT key FROM merged WHERE name = 'layer1'").fetchall()[0][0]
    browser.get(f"{path.as_uri()}#key={key}")
    assert browser.find_element("css selector", "#panel h3").text == "layer1"
    assert browser.get_log("browser") == []


def test_a_table_sorts_by_a_click_and_filters(page):
    details = page.find_element("id", "table-A2")
    page.execute_script("arguments[0].open = true", details)
    cells = "return [...arguments[0].querySelectorAll('tbody tr')].map(row => row.cells[0].textContent)"
    page.implicitly_wait(2)
    button = next(
        each for each in details.find_elements("css selector", "th button") if each.text.startswith("layer index")
    )
    page.execute_script("arguments[0].click()", button)
    assert page.execute_script(cells, details) == ["2", "1", "0"]
    assert details.find_element("css selector", "[aria-sort]").get_attribute("aria-sort") == "descending"
    page.execute_script("arguments[0].click()", button)
    assert page.execute_script(cells, details) == ["0", "1", "2"]
    details.find_element("css selector", "input").send_keys("Conv2d")
    assert page.execute_script(cells, details) == ["1"]


def test_of_fifty_thousand_spans_few_boxes_are_drawn(browser, tmp_path):
    lines = ["step net 0-50001"] + [f"op aten::add {place + 0.2}-{place + 0.8}" for place in range(49_999)]
    rows = [row._replace(step=0, rung=int(Level.OP)) for row in spans("\n".join(lines))]
    page = html.write(trace_of(rows, {"name": "long"}), tmp_path / "long.html")
    browser.get(page.as_uri())
    boxes = seen(browser)["boxes"]
    assert len(boxes) < 2000
    assert sum(box["count"] for box in boxes) == 50_000
    crowd = boxes[len(boxes) // 2]
    assert crowd["count"] > 20
    pointer(browser, crowd["x"], crowd["y"]).click().perform()
    near = seen(browser)["boxes"]
    assert 0 < len(near) < 2000
    assert sum(box["count"] for box in near) < 10_000
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_two_hundred_thousand_spans_of_a_device_are_drawn_as_few_boxes(browser, tmp_path):
    page = html.write(generated(steps=10, layers=100, ops=66), tmp_path / "device.html")
    assert page.stat().st_size < 15_000_000
    browser.get(page.as_uri())
    assert browser.execute_script("return timeline.spans.count") == 199_010
    boxes = seen(browser)["boxes"]
    assert len(boxes) < 5000
    assert sum(box["count"] for box in boxes) == 199_010
    assert browser.get_log("browser") == []


def test_a_click_on_a_kernel_leads_to_its_launch_and_its_layer(browser, tmp_path):
    browser.get(html.write(generated(steps=1, layers=2, ops=4), tmp_path / "device.html").as_uri())
    kernel = next(box for box in seen(browser)["boxes"] if "gemm" in box["name"])
    pointer(browser, kernel["x"], kernel["y"]).click().perform()
    told = browser.find_element("id", "panel").text
    for word in ("launched by", "cudaLaunchKernel", "layers.0", "exact", "gemm", "registers"):
        assert word in told
    assert browser.execute_script("return timeline.related.length") == 1
    assert browser.find_element("id", "verdict").text.startswith("Host and device take nearly the same time")
    browser.execute_script("document.getElementById('which').value = 'devices'; timeline.chooseLanes('devices')")
    assert {box["row"] for box in seen(browser)["boxes"]} == {0, 1}
    assert browser.get_log("browser") == []


@pytest.fixture
def of_two_kinds(browser, tmp_path) -> Any:
    """The page of a run with two kinds of steps and a third one that is only named."""
    names = [{"kind": number, "name": name, "steps": 30} for number, name in enumerate(["generator", HOSTILE, "rare"])]
    rows = [
        {"dur_ns": 10e6 * (1 + step % 2), "kind": step % 2, "rung": 70 if step % 10 in (2, 3) else 10, "before_ns": 4e6,
         "data_ns": 3e6, "status": "error:ValueError" if step == 7 else "ok"}
        for step in range(60)
    ]  # fmt: skip
    first = looped(rows, name="gan", kinds=names)
    second = looped(rows, STEP.replace("layer1", "critic"), 0, name="gan", kinds=names)
    browser.get(html.write(first, tmp_path / "kinds.html", [second]).as_uri())
    return browser


def test_a_choice_shows_the_figures_of_another_kind_of_step(of_two_kinds):
    from selenium.webdriver.support.ui import Select

    page = of_two_kinds
    choice = Select(page.find_element("id", "kind"))
    assert [option.text.split(",")[0] for option in choice.options] == [HOSTILE, "generator"]
    assert {"layer1", "critic"} & {box["name"] for box in seen(page)["boxes"]} == {"layer1"}
    choice.select_by_visible_text(choice.options[1].text)
    assert {"layer1", "critic"} & {box["name"] for box in seen(page)["boxes"]} == {"critic"}
    assert "critic" in page.find_element("id", "table-A2").get_attribute("textContent") or page.execute_script(
        "const table = document.getElementById('table-A2'); table.open = true; "
        "return new Promise(done => setTimeout(() => done(table.textContent.includes('critic')), 300))"
    )
    page.execute_script("plots.forEach(each => each.draw())")
    choice.select_by_index(0)
    assert {"layer1", "critic"} & {box["name"] for box in seen(page)["boxes"]} == {"layer1"}
    assert page.execute_script("return plots.every(each => each.holder.isConnected)")
    page.find_element("css selector", "#kinds summary").click()
    assert "xsp report RUN --kind 2" in page.find_element("id", "kinds").text
    assert page.execute_script("return window.hacked") is None
    assert page.get_log("browser") == []


def test_a_link_to_a_span_of_another_kind_shows_that_kind(of_two_kinds):
    key = of_two_kinds.execute_script(
        "const of = kindOf(1).timeline, get = new Spans(of).get, all = [...Array(of.count).keys()];"
        "return get.key(all.find(place => get.name(place) === 'critic'))"
    )
    assert linked(of_two_kinds, f"key={key}") == ""
    assert of_two_kinds.find_element("css selector", "#panel h3").text == "critic"
    assert of_two_kinds.find_element("id", "kind").get_attribute("value") == "1"
    assert "the timeline shows none" in linked(of_two_kinds, "key=0123456789abcdef")


def test_the_run_over_time_is_drawn_by_step_and_by_time(of_two_kinds):
    from selenium.webdriver.support.ui import Select

    page = of_two_kinds
    drawn = (
        "plots.forEach(each => each.draw()); const [steps, parts] = ['run-steps', 'run-parts'].map(id => plots.find("
    )
    drawn += "each => each.holder.id === id).chart.getOption());"
    series = page.execute_script(
        drawn + "return steps.series.map(each => [each.name, each.symbol || 'circle', each.data.length])"
    )
    assert series == [
        [HOSTILE, "circle", 23], [HOSTILE, "diamond", 6], ["generator", "circle", 24], ["generator", "diamond", 6],
        ["failed", "triangle", 1],
    ]  # fmt: skip
    assert page.execute_script(drawn + "return parts.series.map(each => each.name)") == [
        "the step itself", "waiting for data", "other time between steps",
    ]  # fmt: skip
    last = drawn + "return steps.series[0].data.at(-1)[0]"
    assert page.execute_script(last) == 59
    Select(page.find_element("id", "run-by")).select_by_value("at_s")
    assert page.execute_script(last) == pytest.approx(1.116)
    assert "60 steps, 12 of them recorded." in page.find_element("id", "run").text
    assert page.find_element("id", "run-found").text == ""
    Select(page.find_element("id", "kind")).select_by_index(1)
    assert "waiting for data 21 %" in page.find_element("id", "run-found").text
    assert page.get_log("browser") == []


def test_the_phases_stand_on_top_as_one_bar(of_two_kinds):
    told = of_two_kinds.execute_script(
        "data.screen.sides = [{ name: 'host', total: '100 ms', parts: [['forward', 30, '30 %', '30.0 ms'], "
        "['backward', 45, '45 %', '45.0 ms'], ['waiting for data', 25, '25 %', '25.0 ms']] }]; drawPhases();"
        "return [...document.querySelectorAll('#phases .shares span')].map(each => each.getBoundingClientRect().width)"
    )
    assert [width / sum(told) for width in told] == pytest.approx([0.3, 0.45, 0.25], abs=0.01)
    text = of_two_kinds.find_element("id", "phases").text
    assert text.startswith("host: where the 100 ms go")
    assert "waiting for data 25.0 ms, 25 %" in text


def test_a_page_of_a_trace_without_a_loop_has_no_chart_of_the_run(browser, tmp_path):
    browser.get(html.write(trace(Level.MODEL), tmp_path / "page.html").as_uri())
    hidden = "return ['#run', 'nav a[href=\"#run\"]', '#kinds'].map(each => document.querySelector(each).hidden)"
    assert browser.execute_script(hidden) == [True, True, True]


def test_a_page_without_layers_says_why_charts_are_missing(browser, tmp_path):
    browser.get(html.write(trace(Level.MODEL), tmp_path / "model.html").as_uri())
    assert browser.get_log("browser") == []
    missing = browser.find_element("css selector", "#missing details")
    assert missing.text.startswith("Not on this page, because the trace lacks the data: ")
    assert "\n" not in missing.text
    assert "A2 (Layer information) needs the layer level" in missing.get_attribute("textContent")
    hidden = "return ['#ranks', 'nav a[href=\"#ranks\"]'].map(each => document.querySelector(each).hidden)"
    assert browser.execute_script(hidden) == [True, True]
    assert "One level set alone" in browser.find_element("id", "ledger").text


def test_a_page_of_another_trace_does_not_run_what_is_put_into_it(browser, tmp_path):
    path = html.write(trace(Level.MODEL), tmp_path / "tampered.html")
    path.write_text(path.read_text().replace("<nav", "<script>window.hacked=1</script><nav"))
    browser.get(path.as_uri())
    assert browser.execute_script("return window.hacked") is None
    assert "Content Security Policy" in str(browser.get_log("browser"))


def test_a_trace_of_hostile_names_runs_nothing(browser, tmp_path):
    browser.get(html.write(hostile_trace(), tmp_path / "hostile.html").as_uri())
    browser.execute_script("document.querySelectorAll('details').forEach(each => each.open = true)")
    browser.find_element("id", "find").send_keys(NAMES[0] + "\n")
    assert browser.execute_script("return [window.hacked, document.images.length]") == [None, 0]
    assert all(name in browser.execute_script("return document.body.textContent") for name in NAMES[:3])
    assert browser.get_log("browser") == []
    resources = browser.execute_script("return performance.getEntriesByType('resource').length")
    assert resources == 0


def test_operators_by_gpu_time_come_first_where_there_is_a_gpu(browser, tmp_path):
    first = "const one = document.querySelector('main > section:not([hidden])'); return [one.id, one.innerText];"
    browser.get(html.write(generated(), tmp_path / "gpu.html").as_uri())
    section, shown = browser.execute_script(first)
    assert section == "operators"
    assert "aten::op0" in shown
    assert browser.get_log("browser") == []
    browser.get(html.write(trace(*FULL), tmp_path / "host.html").as_uri())
    assert browser.execute_script(first)[0] != "operators"
    assert browser.execute_script("return document.querySelector('#tables #table-ops') !== null")


def test_sections_of_others_are_drawn_as_text_tables_charts_and_trees(browser, tmp_path):
    hostile = Section(HOSTILE, (Text(HOSTILE), *FULL_SECTION.parts))
    rundir.write_run(tmp_path, {"name": "run"})
    sections.write(tmp_path, "bound", hostile)
    (tmp_path / "sections" / "bad.json").write_text("{}", encoding="utf-8")
    found = trace(*FULL)
    found.path = tmp_path
    browser.get(html.write(found, tmp_path / "report.html").as_uri())
    assert browser.get_log("browser") == []
    section = browser.find_element("id", "section-bound")
    assert section.find_element("tag name", "h2").text == HOSTILE
    assert "The ladder" in section.text
    assert browser.execute_script("return window.hacked") is None
    painted = browser.execute_script("""
        plots.forEach(each => each.draw());
        return [...document.querySelectorAll('#section-bound .chart canvas')].map(canvas =>
            canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(value => value))
    """)
    assert painted == [True, True]
    names = (
        "return [...document.querySelectorAll('#section-bound .chart')].map(each => each.getAttribute('aria-label'))"
    )
    bars, points = browser.execute_script(names)
    assert "1 of 2 without a figure" in bars
    assert "best 4.400 ms" in bars
    assert "2.500 ms" in points
    assert section.find_element("css selector", "summary.marked").get_attribute("title") == "on the longest path"
    assert [each.text for each in section.find_elements("css selector", ".branch.leaf span")][:1] == ["conv"]
    assert "1 section of the run directory cannot be shown" in browser.find_element("id", "others").text
    assert browser.find_element("css selector", 'nav a[href="#section-bound"]').is_displayed()
    assert browser.execute_script("return document.body.scrollWidth <= innerWidth")


def test_a_missing_figure_interrupts_the_lines_of_a_section(browser, tmp_path):
    """Where only the other series has a figure, this one was not measured: its line goes on."""
    series = (Series("first", (1.0, None, None, 4.0)), Series("second", (2.0, None, 3.0, 0.0)))
    chart = Chart("lines", "time", "ms", (1, 2, 3, 4), series, over="batch size", log=("values",))
    rundir.write_run(tmp_path, {"name": "run"})
    sections.write(tmp_path, "bench", Section("Timings", (chart,)))
    found = trace(*FULL)
    found.path = tmp_path
    browser.get(html.write(found, tmp_path / "report.html").as_uri())
    points = browser.execute_script("""
        plots.forEach(each => each.draw());
        const drawn = plots.find(each => each.holder.closest('#section-bench'));
        return drawn.chart.getOption().series.map(each => each.data.map(([x, y]) => [x, y]));
    """)
    assert points == [[[1, 1.0], [2, None], [4, 4.0]], [[1, 2.0], [2, None], [3, 3.0], [4, None]]]
    assert browser.get_log("browser") == []


def test_every_axis_of_values_has_labels_of_at_most_four_digits(browser, tmp_path):
    browser.get(html.write(generated(steps=2, layers=3, ops=4), tmp_path / "axes.html").as_uri())
    labels = browser.execute_script("return [112.94884499999999, 0.25, 1234.5, 123456].map(compact)")
    assert labels == ["112.9", "0.25", "1,235", "123.5K"]
    unformatted = browser.execute_script(
        "plots.forEach(each => each.draw());"
        "const axes = plots.map(({ chart }) => chart.getOption()).flatMap(({ xAxis, yAxis }) => [...xAxis, ...yAxis]);"
        "return axes.filter(axis => axis.type !== 'category' && !axis.axisLabel.formatter).length"
    )
    assert unformatted == 0
    assert browser.get_log("browser") == []


def test_engine_steps_and_the_lives_of_requests_are_drawn_over_the_same_time(browser, tmp_path):
    from engines import trace as served_trace

    statements = [("arrive", HOSTILE, 0, 5), ("arrive", "b", 10, 5), ("step", 20, 60, (HOSTILE, "prefill", 5))]
    statements += [("step", 60, 100, (HOSTILE, "decode", 1), ("b", "prefill", 5)),
                   ("step", 100, 140, ("b", "decode", 1)), ("step", 140, 180, (HOSTILE, "decode", 1)),
                   ("step", 180, 190), ("finish", HOSTILE, 190, "ok"), ("finish", "b", 141, "ok")]  # fmt: skip
    browser.get(html.write(served_trace(statements), tmp_path / "served.html").as_uri())
    option = (
        "plots.forEach(each => each.draw()); const option = id => plots.find(each => each.holder.id === id).chart"
        ".getOption(); return option(arguments[0]).series.map(each => [each.name, each.data])"
    )
    assert browser.execute_script(option, "serving-steps") == [
        ["prefill", [[0.02, 0.06, 0, 1]]], ["decode", [[0.1, 0.14, 2, 1], [0.14, 0.18, 3, 1]]],
        ["mixed", [[0.06, 0.1, 1, 2]]], ["idle", [[0.18, 0.19, 4, 0]]],
    ]  # fmt: skip
    lives = dict(browser.execute_script(option, "serving-lives"))
    assert lives["queue"] == [[0, 0.02, 0, 0], [0.01, 0.06, 0, 1]]
    assert lives["left out"] == [[0.1, 0.14, 3, 0]]
    assert [part[:2] for part in lives["decode"]] == [[0.06, 0.1], [0.14, 0.18], [0.1, 0.14]]
    tips = browser.execute_script(
        "return plots.filter(each => each.group === 'serving').map(({ chart }) => chart.getOption().tooltip[0]"
        ".formatter({ value: chart.getOption().series[0].data[0] }))"
    )
    assert "1 requests" in tips[0] or "1 request" in tips[0]
    assert HOSTILE not in tips[1]  # its text is escaped
    assert browser.execute_script(
        "return ['serving-steps', 'serving-lives'].map(id => document.getElementById(id).querySelector('canvas'))"
        ".every(canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(v => v))"
    )
    assert browser.get_log("browser") == []


def test_a_page_without_an_engine_has_no_chart_of_requests(browser, tmp_path):
    browser.get(html.write(trace(Level.MODEL), tmp_path / "page.html").as_uri())
    hidden = "return ['#serving', 'nav a[href=\"#serving\"]'].map(each => document.querySelector(each).hidden)"
    assert browser.execute_script(hidden) == [True, True]
