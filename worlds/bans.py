"""Reads in words which tools a user forbids: "never use gpt-5", "anything but the search tool".

First the names of tools in a text are replaced by marks, `@3@` for the fourth mention, so that what
forbids a tool can be written as a table of patterns. A name that is an everyday word as well
("code") is marked `~3~`: only clear patterns forbid it.
"""

import re
from collections.abc import Iterable

# Names of tools, kinds and models that are everyday words as well.
EVERYDAY = {
    "answer",
    "code",
    "docs",
    "expert",
    "function",
    "notes",
    "open",
    "records",
    "search",
    "web",
}
SIZES = {"large", "medium", "small"}  # kinds of experts that stand beside the name of one
ARTICLE = r"(?:\b(?:the|any|an?|all|that|this|your) )?"
NOUN = r"(?: (?:models?|tools?|experts?|ones?)\b)?"
# After a size that says something of another word: "avoid large, slow steps".
ADJECTIVE = re.compile(
    r", (?!please|thank|for|whatever|if|just|but|ever|sorry|so|then|and)|(?: and| or) (?!no )"
)
# Between two names of one tool: "medium (kafe-3)", "the medium called kafe-3".
JOINED = re.compile(
    r" (?:(?:model|tool|expert|one|assistant),? )?(?:(?:that is |which is )?"
    r"(?:called|named|known as|aka|with the name|by the name of) )?| ?\(|,? (?:called|named|aka) "
    r"| [-–—/] ?|/"
)
IN_TITLE = re.compile(rf"(?:{JOINED.pattern}|, (?:the |an? )?| the |: )")  # if the title is a name

STRONG, EITHER = r"@\d+@", r"(?:@\d+@|~\d+~)"
END = (
    r"(?=\s*(?:$|[.,;:!?)]|(?:and|or|nor|but|please|thanks|thank you|here|at all|whatever|ever"
    r"|again|any ?more|any longer|now|today|off|from (?:the|your) list|for (?:this|that|it|now|me)"
    r"|of (?:this|that|it)"
    r"|under any|(?:to be )?(?:used|asked|called|involved|consulted|run)|to (?:be|touch|see"
    r"|answer))"
    r"\b))"
)
MORE = rf"(?:,? (?:and|or|nor) (?:no |not )?{EITHER}|, (?:no |not )?{EITHER})*"
TOOLS = rf"(?P<tools>{EITHER}{MORE}){END}"
CLEAR_TOOLS = rf"(?P<tools>{STRONG}{MORE}){END}"

NOT = r"(?:\b(?:never|not|dont|cannot)|n't)(?:,? ever)?(?: to)?"
USE = (
    r"(?:use|call|ask|query|invoke|run|touch|contact|consult|employ|involve|bother|engage|try"
    r"|choose"
    r"|pick|select|trust|want|like|allow|hear from|deal with|work with|go (?:to|with|through|near)"
    r"|turn to|talk to|speak to|resort to|reach for|rely on|depend on|count on|(?:want|wish) to see"
    r"|(?:make )?(?:any )?use of)"
)
USED = r"(?:used|called|asked|involved|touched|consulted|invoked|queried|contacted|employed|run)"
USING = (
    r"(?:using|asking|calling|querying|consulting|invoking|involving|touching|bothering|running"
    r"|contacting|employing|trusting|relying on|turning to|going to|(?:the )?use of)"
)
AVOID = (
    r"(?:avoid|skip|exclude|ignore|drop|leave (?:out|aside|off)|omit|rule out|bypass|shun|forget"
    r"(?: about)?|refuse|reject|disable|boycott|cut out|do without|get by without|without|no more"
    r"|switch off|turn off|forgo|spare me|block|blacklist|veto|dispense with|make do without"
    r"|say no to|refrain from|against|object to|work around|except(?: for)?|excluding|excepting"
    r"|barring|apart from|save for|no need for|get rid of|other than)"
)
NO_HELP = r"(?:no|without) (?:calls?|questions?|help|quer(?:y|ies)|requests?|answers?|use)"
CUT_OFF = (
    r"(?:forbidden|banned|away|off|idle|unused|blacklisted|disabled|no option|no good"
    r"|off[- ]limits|taboo|out|excluded|barred|prohibited|disallowed|unwelcome"
    r"|unacceptable|worthless|useless|bad|closed|unavailable|to be avoided|a no-go|ruled out"
    r"|out of bounds|out of the question|blocked"
    r"|not (?:allowed|permitted|an option|welcome|acceptable|available|wanted|to be \w+))"
)
# "X fails: do not use it", "trouble with X, so leave it out".
DROP_IT = (
    rf"(?:{NOT} {USE} (?:it|them)|(?:leave|keep) (?:it|them) (?:out|alone|aside)"
    rf"|{AVOID} (?:it|them)|no more of (?:it|them)|stay away from (?:it|them)|not again)\b"
)
# What stands before something that is forbidden, whatever it is.
BAN = re.compile(
    rf"{NOT} {USE}:? "
    rf"|\b(?:under no circumstances|on no account|by no means|in no case|at no point) {USE} "
    rf"|\b(?:avoid|without|no|stop|(?:refrain|abstain|desist) from) {USING} "
    r"|\b(?:stay|keep|steer) (?:well |far )?(?:away from|clear of|off) |\bhands off "
    r"|\brather not (?:\w+ )?| (?:forbid you|ask you not|tell you not) to (?:use|call|ask) "
    rf"|\b(?:(?:forbid|ban) you|no (?:permission|leave|right)) to {USE} "
    rf"|\b(?:forbidden|banned|not allowed|not permitted|not supposed) to {USE} "
    rf"|{NOT} (?:spend|waste|lose) (?:\w+ ){{1,3}}(?:on|with|for) "
    r"|\b(?:hate|dislike|distrust|mistrust|detest|done with|enough of|fed up with|tired of|sick of"
    r"|bad experiences? with) "
    r"|\bnothing (?:from|by|through|to|of) |\b(?:use no|(?:forbid|ban|prohibit)s?) "
    rf"|\b{NO_HELP} (?:to|from|of|by) "
    r"|\b(?:nothing|no (?:question|call|request)) (?:may|must|should|can|shall) (?:go|come|pass) "
    r"(?:to|through|from) "
    r"|\b(?:any(?:thing|one|body| \w+)|every(?:thing|one|body| \w+)|all(?: \w+)?)"
    r" (?:but|except|save|bar|besides|other than|else than|apart from)(?: for)? "
)
FORBIDS = [
    re.compile(pattern)
    for pattern in (
        rf"(?:{BAN.pattern}){TOOLS}",
        rf"\b(?:no|not|{AVOID}) {CLEAR_TOOLS}",
        rf"\b(?:leave|keep|put|set|count|cross|take|rule|cut) (?P<tools>{EITHER}{MORE}),? (?:out"
        rf"|alone|aside|away|off|unused)\b",
        rf"(?P<tools>{EITHER}{MORE}) (?:is|are|(?:has to|must|should|shall) (?:stay|be|remain)"
        rf"|stays?|remains?),? {CUT_OFF}",
        rf"(?P<tools>{EITHER}{MORE}) as {CUT_OFF}",
        rf"\b(?:give|let) (?P<tools>{EITHER}{MORE}) (?:a miss|a rest|rest|be|alone)\b",
        rf"\b(?:strike|cross|scratch|remove) (?P<tools>{EITHER}{MORE}) (?:off|from)\b",
        rf"(?P<tools>{EITHER}{MORE}) (?:must|may|should|can|shall|will|is|are)"
        rf"(?: ?not| never|n?'t)(?: ever)? (?:to )?be {USED}",
        rf"(?P<tools>{EITHER}{MORE})(?:\?|:) (?:\w+ )?"
        r"(?:no|never|not|rather not|forget it|skip it)\b",
        rf"(?P<tools>{EITHER}{MORE}) (?:must|may|should|can|shall|will|has|have)"
        r"(?: ?not| never|n?'t| no) (?:touch|see|answer|help|take part|handle|place|business|part)",
        rf"(?<!if )(?P<tools>{STRONG})[^.!?@~]{{0,60}}{DROP_IT}",
    )
]
# The bans among them that cannot be meant of anything but a tool.
CALLS = re.compile(
    rf"(?:{NOT}|\b(?:under no circumstances|on no account)) (?:use|call|ask|query|invoke|contact"
    r"|consult|employ):? |\b(?:stay|keep|steer) (?:away from|clear of) |\bhands off |\buse no "
)
CLAUSE_END = re.compile(r"[.,;:!?)]")
# After a ban word, but no name of a tool.
NO_NAME = re.compile(r"(?:it|them|this|that|these|those|me|you|up|out|about|on|too|so|more|to)\b")


def bans_in(text: str, names: Iterable[str]) -> list[str]:
    """Returns those of the names that a text forbids: "never use gpt-5", "no web search".

    Words that only contain a name are no ban: "do not use large numbers", "there is no answer".
    """
    marked, mentions = _marked(text, names)
    bans = []
    for pattern in FORBIDS:
        for match in pattern.finditer(marked):
            for mark in re.findall(r"\d+", match["tools"]):
                bans += mentions[int(mark)]
    return list(dict.fromkeys(bans))


def unknown_ban(text: str, names: Iterable[str]) -> str:
    """Returns what a text forbids that is none of the names, "" if there is nothing.

    "never use gpt-55" is an example; so is "do not use large numbers".
    """
    marked, mentions = _marked(text, names)
    known = {match.start() for match in FORBIDS[0].finditer(marked)}
    for ban in CALLS.finditer(marked):
        rest = CLAUSE_END.split(marked[ban.end() :])[0].strip()
        if ban.start() not in known and rest and not NO_NAME.match(rest):
            return _unmarked(rest, mentions)
    return ""


def _marked(text: str, names: Iterable[str]) -> tuple[str, list[list[str]]]:
    """Returns a text with a mark for each mention of a tool, and the names in each mention."""
    plain = re.sub(r"[@~]", " ", _unquoted(text))
    by_key = {_key(name): name for name in names}
    mentions: list[list[str]] = []
    parts, at = [], 0
    for start, end, found in _mentions(plain, by_key):
        whole = re.compile(rf"{ARTICLE}$").search(plain, at, start)
        noun = re.compile(NOUN).match(plain, end)
        everyday = not noun[0] and all(_key(name) in EVERYDAY for name in found)
        everyday |= not noun[0] and plain[start:end] in SIZES and bool(ADJECTIVE.match(plain, end))
        mark = f"~{len(mentions)}~" if everyday else f"@{len(mentions)}@"
        parts += [plain[at : whole.start()], mark]
        mentions.append(found)
        at = noun.end()
    return "".join(parts) + plain[at:], mentions


def _mentions(plain: str, by_key: dict[str, str]) -> Iterable[tuple[int, int, list[str]]]:
    """Yields where a text mentions a tool, and its names there: one, or a kind and an alias."""
    forms = [key.split(" ") for key in sorted(by_key, key=len, reverse=True)]
    joined = "|".join(r"[\s_-]+".join(map(re.escape, form)) for form in forms)
    if not joined:
        return
    found = [*re.finditer(rf"(?<![\w-])(?:{joined})(?![\w-])", plain)]
    while found:
        first = found.pop(0)
        start, end, keys = first.start(), first.end(), [_key(first[0])]
        if found:
            second = _key(found[0][0])
            between = plain[end : found[0].start()]
            title = next(
                (t for t in (f"{keys[0]} {second}", f"{second} {keys[0]}") if t in by_key), ""
            )
            kind_follows = second in SIZES and re.fullmatch(", (?:the|an?) ", between)
            in_title = title and IN_TITLE.fullmatch(between)
            if JOINED.fullmatch(between) or in_title or kind_follows:
                end = found.pop(0).end()
                keys = [title] if title else [keys[0], second]
        if plain[start:end].count("(") > plain[start:end].count(")") and plain[end:][:1] == ")":
            end += 1
        special = [key for key in keys if key not in EVERYDAY | SIZES]
        yield start, end, [by_key[key] for key in special or keys]


def _unmarked(text: str, mentions: list[list[str]]) -> str:
    return re.sub(r"[@~](\d+)[@~]", lambda mark: mentions[int(mark[1])][0], text)


def _key(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name.casefold()).strip()


def _unquoted(text: str) -> str:
    plain = " ".join(text.casefold().replace("’", "'").split())
    return re.sub(r"[`\"“”*]|(?<!\w)'|'(?!\w)", "", plain)
