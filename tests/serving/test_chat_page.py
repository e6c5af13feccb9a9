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

   more of one

2. two
goes on
- other
- - - -
> quoted
> * two

```python
print("<b>")
```

|a|{EVIL}|
|-|-|
|1|2|
"""
# A text that comes a character at a time looks as it does at once.
AS_IT_COMES = """(text) => {
  const answer = new Answer(document.createElement("div"));
  for (const character of text) {
    answer.say(character);
    answer.refresh();
  }
  return answer.root.innerHTML;
}"""


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
def problems():
    """Errors of scripts, and what the page's policy forbids."""
    problems = []
    yield problems
    assert not problems


def open_page(browser, running, problems, **settings):
    page = browser.new_page(**settings)
    page.set_default_timeout(60_000)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda entry: problems.append(entry.text) if "Policy" in entry.text else None,
    )
    page.goto(running.base)
    page.locator("#examples button").wait_for()
    return page


def replies(page, count):
    """The replies, once the newest of `count` is complete."""
    page.locator(".foot").nth(count - 1).wait_for(state="attached")
    return page.locator(".reply")


@pytest.mark.slow
def test_a_conversation(running, browser, problems):
    size = {"width": 390, "height": 800}
    page = open_page(browser, running, problems, viewport=size, color_scheme="light")
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.get_by_role("button", name="!ask").click()
    reply = replies(page, 1).first
    assert reply.locator(".answer").inner_text() == "Answer: fourty-two, or so."
    assert "cost $0.25, 2.6 s" in reply.locator(".foot").inner_text()
    assert reply.locator("summary").inner_text() == "1 call"
    assert not reply.locator("pre").is_visible()
    reply.locator("summary").click()
    assert reply.locator(".think").first.inner_text() == "hmm"
    assert reply.locator(".call").inner_text() == 'echo({"text":"hi"}) $0.25, 2.0 s\nhi'

    page.locator("#settings > summary").click()
    assert "$0.25 per call" in page.locator("#tools").inner_text()
    page.get_by_role("switch").click()
    page.get_by_label("At most, $").fill("0.5")
    message = page.get_by_label("Message")
    message.fill("<b>please</b> !ask")
    message.press("Enter")
    message.press("Enter")
    refused = replies(page, 2).nth(1)
    assert refused.locator(".refusal").inner_text() == "the user forbids echo"
    assert running.preferences[-1] == Preference(usd=0.5, never=["echo"])
    user = page.locator(".user").nth(1).inner_text()
    assert user == "<b>please</b> !ask\n\nat most $0.5; without echo"  # text, not markup

    page.reload()
    assert replies(page, 2).count() == 2 and not page.locator("#blank").is_visible()
    for width, scheme, color in ((390, "light", "255, 255, 255"), (1280, "dark", "22, 24, 28")):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == f"rgb({color})"
    assert all(url.startswith(running.base) for url in asked)
    page.get_by_role("button", name="New").click()
    page.reload()
    page.locator("#examples button").wait_for()
    assert page.locator(".reply").count() == 0
    page.close()


def stream(*chunks, end="data: [DONE]\n\n"):
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end


def chunk(delta, reason=None, **told):
    return {"choices": [{"delta": delta, "finish_reason": reason}], "nanorchestra": told}


@pytest.mark.slow
def test_texts_stay_texts_and_what_ends_an_answer_is_said(running, browser, problems):
    """Whatever an answer, a tool, an error or a broken connection brings."""
    page = open_page(browser, running, problems)
    answers = []
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**answers[-1]))

    def ask(body, **response):
        answers.append({"content_type": "text/event-stream", "body": body} | response)
        page.get_by_label("Message").fill(EVIL)
        page.get_by_label("Message").press("Enter")
        return replies(page, len(answers)).nth(len(answers) - 1)

    price = {"cost_usd": 1e-7, "latency_s": 1.0, "error": False, "refused": False}
    call = json.dumps({"name": EVIL, "arguments": {EVIL: EVIL}})
    limit = {"content": "Error: refused large: up to $0.012, $0.005 left", "error": True}
    reply = ask(
        stream(
            chunk({"reasoning_content": EVIL}),
            chunk({}, call='{"name": "large"}'),
            chunk({}, result=price | limit | {"refused": True}),
            chunk({}, call=call),
            chunk({}, result=price | {"content": EVIL}),
            chunk({"content": MARKDOWN[:70]}),
            chunk({"content": MARKDOWN[70:]}, "stop", status="answered", right=False, expected=EVIL)
            | {"usage": {"completion_tokens": 1}},
        )
    )
    refusal = f"refused large: up to $0.012, $0.005 left; used {EVIL}"
    assert reply.locator(".refusal").inner_text() == refusal
    assert reply.locator(".verdict").inner_text() == f"✗ wrong, it is {EVIL}"
    answer = reply.locator(".answer")
    assert answer.locator("h4").inner_text() == EVIL
    assert answer.locator("strong code").inner_text() == "x"
    assert answer.locator("a").count() == 1  # no other scheme than http
    assert answer.locator("ol li ul li").inner_text() == EVIL
    assert answer.locator("pre code").inner_text() == 'print("<b>")'
    assert answer.locator("th").nth(1).inner_text() == EVIL
    assert page.evaluate(AS_IT_COMES, MARKDOWN) == answer.inner_html()

    called = chunk({}, call='{"name": "f"}'), chunk({}, result=price | {"content": "seen"})
    last = chunk({"content": "\n\n57"}, "stop", status="answered", cost_usd=1234.5, latency_s=1e4)
    beside = ask(stream(chunk({"content": "I look."}), *called, last))
    assert beside.locator(".answer").inner_text() == "57"
    assert "cost $1,234.5, 10,000.0 s (measured " in beside.locator(".foot").inner_text()
    beside.locator("summary").click()
    assert beside.locator(".aside").inner_text() == "I look."

    half = stream(chunk({"content": "half"}), end="")
    assert "broke off" in ask(half).locator(".error").inner_text()
    assert "the most tokens" in ask(stream(chunk({"content": "a"}, "length"))).inner_text()
    user_limit = stream(chunk({}, "length", status="user_limit", cost_usd=0.1, latency_s=1.0))
    assert "a limit of yours" in ask(user_limit).locator(".error").inner_text()
    assert EVIL in ask(stream({"error": {"message": EVIL}})).locator(".error").inner_text()
    assert page.get_by_label("Message").input_value() == EVIL  # to be sent again
    error = {"message": EVIL, "code": "outside_the_world"}
    outside = ask(json.dumps({"error": error}), status=400, content_type="application/json")
    assert outside.inner_text() == "Ask like this.\n!ask"
    assert outside.locator(".error").count() == 0
    assert page.get_by_label("Message").input_value() == ""
    assert "502" in ask("<html>", status=502, content_type="text/html").inner_text()
    large = ask(stream(chunk({"content": "word **bold** [ * `\n" * 10_000}, "stop")))
    assert len(large.locator(".answer").inner_text()) > 150_000

    page.reload()
    replies(page, len(answers))
    assert page.evaluate("window.hit") is None
    assert page.locator("#talk :is(img, script)").count() == 0
    page.add_init_script("localStorage.nanorchestra = '[{\"question\": 1}]'")
    page.reload()
    page.locator("#examples button").wait_for()  # what is no conversation is forgotten
    page.close()
