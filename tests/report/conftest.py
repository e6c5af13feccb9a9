"""Opens the pages of reports in headless Chromium."""

import shutil

import pytest


@pytest.fixture(scope="module")  # other modules run event loops of their own
def chromium():
    playwright = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with playwright.sync_playwright() as started:
        try:
            browser = started.chromium.launch(
                executable_path=path, args=["--no-sandbox", "--disable-gpu"]
            )
        except playwright.Error as error:
            pytest.skip(f"no Chromium ({str(error).splitlines()[0]})")
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium):
    """Opens the report of a run's folder; fails where a script does, or asks for anything."""
    problems, pages = [], []

    def open_report(folder, width=1280, scheme="light", **options):
        page = chromium.new_page(
            viewport={"width": width, "height": 800}, color_scheme=scheme, **options
        )
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda said: problems.append(said.text))
        page.on("dialog", lambda dialog: (problems.append("dialog"), dialog.dismiss()))
        page.on("request", lambda sent: asked.append(sent.url))
        asked: list[str] = []
        page.goto(f"file://{(folder / 'report.html').resolve()}")
        pages.append((page, asked))
        return page

    yield open_report
    for page, asked in pages:
        assert {url.partition("#")[0] for url in asked} == {page.url.partition("#")[0]}
        page.close()
    assert not problems
