"""The report in a real browser: no errors, no requests, every image there, and nothing cut off on a phone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lab_runs
import pytest

from seminode_lab import report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver")

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
SIZES = {"desktop": (1280, 900), "phone": (360, 740)}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = lab_runs.write_all(tmp_path_factory.mktemp("runs"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "draw", lab_runs.draw)
        return report.write(folder).html


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(params=SIZES)
def opened(request: pytest.FixtureRequest, browser: Any, page: Path) -> Any:
    """The page in a window of each size."""
    width, height = SIZES[request.param]
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": request.param == "phone"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    for log in ("browser", "performance"):
        browser.get_log(log)  # what was before
    browser.get(page.as_uri())
    return browser


def test_the_page_has_no_errors_and_asks_for_nothing(opened: Any, page: Path) -> None:
    assert opened.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in opened.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith("data:")] == [page.as_uri()]


def test_every_image_is_shown(opened: Any) -> None:
    sizes = opened.execute_script("return [...document.images].map(image => [image.complete, image.naturalWidth])")
    assert len(sizes) == 7
    assert all(complete and width > 0 for complete, width in sizes)


def test_the_page_does_not_scroll_sideways(opened: Any) -> None:
    root, window = opened.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert root <= window
    # Nor is anything cut off that cannot be scrolled to.
    out = opened.execute_script("""
        return [...document.querySelectorAll("main *")].filter(element =>
            element.getBoundingClientRect().right > window.innerWidth + 1 && !element.closest(".scroll, .picture, pre"))
            .map(element => element.outerHTML.slice(0, 200))""")
    assert out == []


def test_tables_can_be_read_to_their_last_column(opened: Any) -> None:
    """In their own boxes, in letters of a size that can be read, with the names of the rows in sight."""
    found = opened.execute_script("""
        return [...document.querySelectorAll("section > .scroll")].map(box => {
            box.scrollLeft = box.scrollWidth
            const cells = [...box.querySelector("tbody tr:not(.heading)").querySelectorAll("td:not(.minor)")]
            const last = cells[cells.length - 1].getBoundingClientRect()
            const name = box.querySelector("tbody th[scope=row]").getBoundingClientRect()
            const inside = box.getBoundingClientRect()
            return {
                right: inside.right - last.right, left: name.left - inside.left, name: name.right, last: last.left,
                size: parseFloat(getComputedStyle(box.querySelector("td")).fontSize),
            }
        })""")
    assert len(found) == 5
    for table in found:
        assert table["right"] >= 0
        assert 0 <= table["left"] < 10
        assert table["name"] <= table["last"] + 1
        assert table["size"] >= 12


@pytest.mark.parametrize("width", [1280, 390])
def test_the_column_of_best_is_in_sight(browser: Any, page: Path, width: int) -> None:
    """Without scrolling, in the tables of the experiments and of the steps."""
    screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.get(page.as_uri())
    found = browser.execute_script("""
        return ["ncde", "cnf", "hnn", "rejections"].map(name => {
            const box = document.querySelector(`#table-${name}`).closest(".scroll")
            const last = box.querySelector("tbody td:last-child").getBoundingClientRect()
            return box.getBoundingClientRect().right - last.right
        })""")
    assert min(found) >= 0


@pytest.mark.parametrize("size", [(1280, 900), (390, 844)])
def test_the_picture_of_the_summary_is_on_the_first_screen(browser: Any, page: Path, size: tuple[int, int]) -> None:
    """It begins in the upper half, above the contents on a phone, with a verdict beside the name of each row."""
    screen = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size[0] < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.get(page.as_uri())
    top, contents, groups, verdicts = browser.execute_script("""
        const top = selector => document.querySelector(selector).getBoundingClientRect().top
        const count = selector => document.querySelectorAll(selector).length
        return [top(".bars"), top("nav.toc"), count(".bars > div"), count(".bars h3 .badge")]""")
    assert top < size[1] / 2
    assert size[0] > 500 or top < contents
    assert groups == verdicts > 0


def test_the_page_can_be_read_in_the_dark(browser: Any, page: Path) -> None:
    def brightness(scheme: str) -> list[float]:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        browser.get(page.as_uri())
        style = "getComputedStyle(document.body)"
        colours = browser.execute_script(f"return [{style}.color, {style}.backgroundColor]")
        return [sum(map(int, colour[4:-1].split(","))) / 3 for colour in colours]

    ink, paper = brightness("light")
    assert paper - ink > 150
    ink, paper = brightness("dark")
    assert ink - paper > 150


def test_without_scripts_all_is_there(browser: Any, page: Path) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(page.as_uri())
        from selenium.webdriver.common.by import By

        assert "98\n± 0" in browser.find_element(By.ID, "table-hnn").text
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_it_can_be_printed(browser: Any, page: Path) -> None:
    browser.get(page.as_uri())
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    assert len(printed["data"]) > 10_000
