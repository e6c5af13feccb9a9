"""The chat page in headless Chromium: a conversation with calls and costs, light and dark."""

from __future__ import annotations

import shutil

import pytest

playwright = pytest.importorskip("playwright.sync_api")
ARGS = ["--no-sandbox", "--disable-gpu"]


@pytest.fixture(scope="module")
def browser():
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with playwright.sync_playwright() as started:
        try:
            browser = started.chromium.launch(executable_path=path, args=ARGS)
        except playwright.Error as error:
            pytest.skip(f"no Chromium ({str(error).splitlines()[0]})")
        yield browser
        browser.close()


@pytest.mark.slow
@pytest.mark.parametrize("width, scheme", [(390, "light"), (1200, "dark")])
def test_a_conversation_shows_reasoning_calls_costs_and_the_answer(running, browser, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    problems, asked = [], []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda entry: problems.append(entry.text) if entry.type == "error" else None)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(running.base)
    page.get_by_label("Message").fill("<b>please</b> !ask")
    page.get_by_label("Message").press("Enter")
    page.get_by_text("Answer: fourty-two, or so.").wait_for(timeout=5000)
    assert "$0.25, 2.0 s" in page.locator(".call").inner_text()
    assert "turns: 2, calls: 1" in page.locator(".sum").inner_text()
    assert page.locator(".user").inner_text() == "<b>please</b> !ask"  # text, not markup
    page.locator(".think summary").first.click()
    assert page.locator(".think p").first.inner_text() == "hmm"
    page.get_by_label("Model").select_option("nano")
    page.get_by_label("Message").fill("!poison")
    page.get_by_role("button", name="Send").click()
    page.get_by_text("not finite").wait_for(timeout=5000)
    page.get_by_label("Message").fill("!say")
    page.get_by_role("button", name="Send").click()
    page.locator(".reply").nth(2).locator(".answer").wait_for(timeout=5000)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(22, 24, 28)")
    assert all(url.startswith(running.base) for url in asked)
    page.get_by_role("button", name="New").click()
    assert page.locator(".reply").count() == 0
    assert not [
        problem for problem in problems if "500" not in problem and "favicon" not in problem
    ]
    page.close()
