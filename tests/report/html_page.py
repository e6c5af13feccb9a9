"""Reads a page as a browser does: its tags, its text, and its tables."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """tags: names of all elements. text: all that is shown. tables: rows of texts of each."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.text, self.tables, self.meta = set(), "", [], {}
        self.feed((path / "report.html").read_text())
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag == "meta":
            given = dict(attributes)
            self.meta[given.get("http-equiv") or given.get("name")] = given.get("content")
        elif tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_data(self, data):
        self.text += data
        if self.lasttag in ("td", "th"):
            self.tables[-1][-1][-1] += data.strip("\n")

    def row(self, name, table=0):
        """The texts of a row by the title of their column."""
        heads, *rows = self.tables[table]
        (found,) = [row for row in rows if row[0] == name]
        return dict(zip(heads, found, strict=True))

    def loads_and_runs_nothing(self):
        allowed = "default-src 'none'; style-src 'unsafe-inline'"
        active = {"script", "img", "link", "iframe", "a", "object", "form", "foreignobject"}
        return self.meta["Content-Security-Policy"] == allowed and not self.tags & active
