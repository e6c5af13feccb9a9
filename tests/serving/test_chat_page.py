"""The chat page in headless Chromium: against the server, and against answers that attack it."""

from __future__ import annotations

import json
import shutil

import pytest

from nanorchestra.records import Preference

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
ARGS = ["--no-sandbox", "--disable-gpu"]
EVIL = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>'
MARKDOWN = f"""## {EVIL}
It is **`x`** by [here](https://a.example/) and [there](javascript:alert(1)), {EVIL}

1. one
   - {EVIL}


|a|{EVIL}|
|-|-|
|1|2|
"""


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


@pytest.fixture
def page(browser, running):
    """The page, in which no script fails and nothing is asked for that its policy forbids."""
    problems = []
    page = browser.new_page()
    page.set_default_timeout(60_000)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console", lambda entry: problems.append(entry.text) if "Policy" in entry.text else None
    )
    page.goto(running.base)
    page.locator("#examples button").wait_for()
    yield page
    page.close()
    assert not problems


def replies(page, count):
    """The replies, once the newest of `count` is complete."""
    page.locator(".foot").nth(count - 1).wait_for(state="attached")
    return page.locator(".reply")


@pytest.mark.slow
def test_a_conversation(running, page):
    """It asks no other server, is there after a reload, and keeps no key."""
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.get_by_role("button", name="!ask").click()
    reply = replies(page, 1).first
    assert reply.locator(".answer").inner_text() == "Answer: fourty-two, or so."
    assert "cost $0.25, 2.6 s" in reply.locator(".foot").inner_text()
    reply.locator("summary").click()
    assert reply.locator(".call").inner_text() == 'echo({"text":"hi"}) $0.25, 2.0 s\nhi'

    page.evaluate("document.querySelector('#tools li').id = 'before'")
    page.get_by_label("API key").fill("sk-secret")
    page.get_by_label("At most, $").fill("0.5")
    page.locator("#before").wait_for(state="detached")  # the key has loaded the tools anew
    page.get_by_role("switch").click()
    page.get_by_label("Message").fill("<b>please</b> !ask")
    with page.expect_request("**/v1/chat/completions") as request:
        page.get_by_label("Message").press("Enter")
    assert request.value.headers["authorization"] == "Bearer sk-secret"
    refused = replies(page, 2).nth(1)
    assert refused.locator(".refusal").inner_text() == "the user forbids echo"
    assert running.preferences[-1] == Preference(usd=0.5, never=["echo"])
    user = page.locator(".user").nth(1).inner_text()
    assert user == "<b>please</b> !ask\n\nat most $0.5; without echo"  # text, not markup

    page.reload()
    assert replies(page, 2).count() == 2 and not page.locator("#blank").is_visible()
    assert "sk-secret" not in page.evaluate("JSON.stringify(localStorage)")
    assert all(url.startswith(running.base) for url in asked)


def stream(*chunks, end="data: [DONE]\n\n"):
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end


def chunk(delta, reason=None, **told):
    return {"choices": [{"delta": delta, "finish_reason": reason}], "nanorchestra": told}


@pytest.mark.slow
def test_texts_stay_texts_and_what_ends_an_answer_is_said(page):
    """Whatever an answer, a tool, an error or a broken connection brings."""
    answers = []
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**answers[-1]))

    def ask(body, **response):
        answers.append({"content_type": "text/event-stream", "body": body} | response)
        page.get_by_label("Message").fill(EVIL)
        page.get_by_label("Message").press("Enter")
        return replies(page, len(answers)).nth(len(answers) - 1)

    price = {"cost_usd": 1e-7, "latency_s": 1.0, "error": False, "refused": False}
    call = json.dumps({"name": EVIL, "arguments": {EVIL: EVIL}})
    reply = ask(
        stream(
            chunk({"reasoning_content": EVIL}),
            chunk({}, call=call),
            chunk({}, result=price | {"content": EVIL}),
            chunk({"content": MARKDOWN[:70]}),
            chunk({"content": MARKDOWN[70:]}, "stop", status="answered", right=False, expected=EVIL)
            | {"usage": {"completion_tokens": 1}},
        )
    )
    assert reply.locator(".verdict").inner_text() == f"✗ wrong, it is {EVIL}"
    answer = reply.locator(".answer")
    assert answer.locator("a").count() == 1  # no other scheme than http
    assert answer.locator("ol li ul li").inner_text() == EVIL
    assert answer.locator("th").nth(1).inner_text() == EVIL

    half = stream(chunk({"content": "half"}), end="")
    assert "broke off" in ask(half).locator(".error").inner_text()
    assert EVIL in ask(stream({"error": {"message": EVIL}})).locator(".error").inner_text()
    page.reload()
    replies(page, len(answers))
    assert page.evaluate("window.hit") is None
    assert page.locator("#talk :is(img, script)").count() == 0
