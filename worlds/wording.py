"""Translates between the weights of a preference and words, both ways.

The reward holds a preference as weights; the policy reads it as words. What a user types states one
of them, sometimes both. `understood` completes it: weights without words get the sentences that
policies were trained on, words without weights get the weights that they state, and a ban in words
becomes a ban that the loop enforces.
"""

import math
import re
from collections.abc import Collection
from dataclasses import replace

from nanorchestra.records import Preference
from nanorchestra.schemas import Json
from worlds import preferences
from worlds.bans import bans_in

Weights = tuple[float, float, float]  # of outcome, cost and latency
WEIGHED = {"outcome", "accuracy", "cost", "latency"}  # entries of a vector that are Weights

# What a clause is about, by its words. LIKE: what a user asks for ("cheap"). NAMED: what is wanted
# or waived by the words around it ("the price"). DISLIKE: what is not wanted, or waived ("slow").
OF = (  # "the cost of the war" is no wish, "the cost of it" is one
    r"(?! of (?!(?:it|this|that|each|every|all|your|answers?|tools?|calls?"
    r"|the (?:answer|tools?|calls?|whole))\b))"
)
LIKE = {
    "outcome": (
        r"right|correct\w*|accura\w+|perfect\w*|precis\w+|exact\w*|flawless\w*|faultless\w*|true"
        r"|sound|trustworthy|reliab\w+|dependable|error-free|quality|certain\w*|sure|confiden\w+"
        r"|positive|convinced|careful(?! with)|carefully|thorough\w*|diligent\w*|meticulous\w*"
        r"|rigorous\w*|conscientious|best|proven|verif\w+|valid|infallible|unerring\w*|truth"
        r"|proper\w*|double-check\w*|check (?:it|your|twice)|stakes|lives|serious|no game"
        r"|(?:can|must) (?:trust|rely on|count on|depend on)|i rely|depends? on"
        r"|think (?:hard|carefully|twice|it|well)|doubts?|doubtless|excellen\w+|top|strongest"
        r"|smartest|ablest|finest|greatest|capable|competent|solid|watertight|foolproof"
        r"|bulletproof|impeccable|trustworth\w+|scientist|perfectionist|straight|for the record"
        r"|rigou?r|with care|take care|great care|confirm\w*|consequences|truthful\w*"
        r"|factual\w*|risk\w*"
        r"|(?:it|this) (?:really |truly )?matters"
    ),
    "cost": (
        r"cheap\w*|inexpensive\w*|(?:least|less) (?:expensive|costly|pricey|money)|frugal\w*"
        r"|economical\w*|economi[sz]\w+|thrift\w*|afford\w*(?! (?:to be|an?|any) )|low-cost"
        r"|low(?:est)?-priced?|cost-\w+|stingy|sparing\w*|careful with|bargain|(?:next to"
        r"|almost) nothing"
        r"|for (?:as little|nothing|free|less)|broke|penniless|hard up|poor|skint"
        r"|shoestring|discount|debts?|student|payday|salary|afford nothing|prudent with|tight"
        r"|(?:not|n't) (?:rich|wealthy|made of)|earn\w*|income|pension|unemployed|jobless"
        r"|bankrupt|strapped|(?:the|my) rent|wages"
        r"|bank account|coins?|euros?|bucks?|dime"
    ),
    "latency": (
        r"fast\w*|quick\w*|swift\w*|rapid\w*|speed(?:y|i\w+)|snapp\w+|brisk\w*|instant\w*|prompt\w*"
        r"|immediate\w*|hurry|rush|soon\w*|urgent\w*|asap|right away|at once|straight ?away|by now"
        r"|right now|now$|in (?:a flash|no time)|before long|without (?:\w+ )?delay|yesterday|ago"
        r"|chop|hop to it|look sharp|get (?:going|moving)|get a move on|pressing|pronto|promptness"
        r"|sooner|patience|impatient|turbo|ages|forever|all day|step on it|on the double|jiffy"
        r"|today|tonight|earl(?:y|ier|iest)|this (?:minute|instant)"
        r"|no time to|lose no time|time-critical|out of time|tight schedule|lightning|express|haste"
        r"|shortly|shortest|(?:it|wait|time|delay) (?:as )?(?:short|brief)|expedit\w+|hast\w+"
        r"|i (?:must|have to|need to|should) (?:leave|go|run)"
    ),
}
NAMED = {
    "outcome": r"getting it|being right",
    "cost": (
        rf"(?:costs?|prices?|priced|spending|expens(?:e|es|diture)|fees?|charges?|budget){OF}"
        r"|charged|economy|money|cash|funds?|savings?|spend(?! (?:\w+ ){0,3}time(?! or| and))\w*"
        r"|sav(?:e|es|ing)(?! (?:\w+ )?time(?! (?:and|or) (?:money|cash)))|pay|paying|paid|wallet"
        r"|purse|pockets?|tab"
        r"|(?:the|my|our|an?|big|large|high|low|lowest|small|smallest|minimal|modest|tiny|final"
        r"|total) bill(?! of)|cents?|penn(?:y|ies)|dollars?"
        r"|use up|(?:wast|burn|throw|blow|squander)\w*(?! (?:\w+ ){0,2}time)"
    ),
    "latency": (
        rf"(?:(?<!this )(?<!next )(?<!last )time(?! (?:zones?|series|travel|machine))|speed|latency"
        rf"|duration|pace){OF}|clock|deadline|seconds?|minutes?|moments?"
    ),
}
DISLIKE = {
    "outcome": (
        r"mistakes?|mistaken|errors?|wrong\w*|false|incorrect|guess\w*|slips?|blunders?|misled"
        r"|miscalculat\w+|inaccura\w+|untrue|flaws?|failures?"
        r"|fooled|nonsense|hallucinat\w+|(?:mess|screw) up|make (?:it|things) up|sloppy|careless"
        r"|oversights?|bugs?"
    ),
    "cost": (
        r"expensive\w*|costly|pric(?:e?y|ier)|dear(?:er)?|high-priced|overpriced"
        r"|costs? (?:\w+ )?(?:a lot|much|more|something|extra|money|what|a fortune)"
        r"|(?:high|big|large|higher) (?:costs?|prices?|bills?|fees?)|cost(?:ing)? more"
    ),
    "latency": (
        r"slow\w*|sluggish|late|(?<!as )(?<!before )long(?:er)?(?! as)|a while|wait(?:s|ed"
        r"|ing)?"
        r"|delay(?:s|ed)?|lag|linger|dawdle|dally|dither|tarry|takes? (?:its|some) time"
    ),
}
SMALL = r"low\w*|small\w*|minim\w+|least|modest|tiny|little|less|down|nothing|few|short\w*|save"
ASKED = {name: re.compile(rf"\b(?:{LIKE[name]}|{NAMED[name]})(?!\w)") for name in LIKE}
LIKED = {name: re.compile(rf"\b(?:{words}|{SMALL})(?!\w)") for name, words in LIKE.items()}
DISLIKED = {name: re.compile(rf"\b(?:{words})(?![\w-])") for name, words in DISLIKE.items()}
NOT_LIKED = re.compile(  # "not cheap or fast" waives, "not too slow" does not
    rf"(?:and )?not (?!too\b|\w+ too\b|(?:{'|'.join(DISLIKE.values())})\b)"
)
# "Time does not matter", "take your time": the clause waives what it names.
WAIVED = re.compile(
    r"\bregardless\b|\bignor(?:e|ing)\b|\b(?:unimportant|unlimited|irrelevant|immaterial|minor"
    r"|secondary)\b"
    r"|\bno (?:rush|hurry|problem|object|issue|limits?|concern|role|difference|matter|attention"
    r"|worr(?:y|ies)|urgency|need|expense)\b|\b(?:never ?mind|forget about|spare no|plenty of)\b"
    r"|\btake (?:your|all the|as (?:much|long))\b|\b(?:all the|enough|lots of|ample) time\b"
    r"|\b(?:spend|pay) (?:what|as much|freely|any|all)|\bthere to be spent\b|\bcan afford\b"
    r"|\b(?:can|will|could|may|i'll) wait\b|\b(?:willing|happy|ready|glad|prepared) to\b"
    r"|\b(?:forget|hang|damn) the\b|\bcomes? (?:last|later)\b|\bbudget is (?:open|big|large"
    r"|unlimited)\b"
    r"|\bmoney is there\b|\b(?:even|also) at a (?:high|great|big)\b|\bnot think about\b"
    r"|n't think about\b"
    r"|\bneither\b.* (?:matters?|counts?)\b|\bat any\b|\bwhatever\b|\bpatien\w+\b"
    r"|\b(?:not|never|none) (?:(?:really|very) )?(?:of )?(?:the|my|your|an?|in a) (?:\w+ )?(?:hurry"
    r"|rush|concerns?|problems?|worr(?:y|ies)|issues?|priority|factor|point|matter|cheap\w*|fast\w*"
    r"|quick\w*)\b"
    r"|(?:\bnot|\bdont|n't|\bnever|\bneed not) (?:\w+ )?(?:matter|mind|care|worry|worried|important"
    r"|rush|hurry|count|bother|bothered|crucial|essential|have to be|need to be|need it|be (?:cheap"
    r"|fast|quick))\b(?! (?:less|to)\b)"
    # Willing to pay or to wait, or able to.
    r"|\b(?:i'd|i'll|can|may|will|would|could) (?:gladly |happily |even |always )?(?:pay|spend)\b"
    r"(?!.*\b(?:little|less|least|nothing|minimum|few|only|no|not|necessary|myself|own|must)\b)"
    r"|\b(?:fine|okay|ok|content|happy) with\b|\bput up with\b|\baccept\b|\btolerate\b|\bobject\b"
    r"|(?<!not )\b(?:have|has|got|there is|there's) (?:got )?(?:the |some )?(?:time|money|cash"
    r"|funds)\b"
    r"|\b(?:enough|plenty|lots|ample|all the|more than enough) (?:of )?(?:money|cash|funds"
    r"|budget)\b"
    r"|(?<!not )\b(?:rich|wealthy|generous\w*|gladly|happily|freely|lavish\w*|splurge)\b"
    r"|\b(?:sky|ceiling|limitless|endless|bottomless|open-ended|blank|damn\w*|hang|to hell)\b"
    r"|\bwhat(?:ever)? (?:it|you)\b(?!.*\bbut\b)|\bas (?:you|much as)\b(?! can)"
    r"|\ball (?:day|week|night)\b|\bwhenever\b|\bleisure\b|\b(?:soon|early|fast|quick) enough\b"
    r"|\bno (?:\w+ )?(?:deadline|pressure|need|urgency|obstacle|hindrance|consideration)\b"
    # "Cost is not decisive", "speed is of little interest"; "my budget is not large" is a wish.
    r"|\b(?:is|are|was|be) (?:of |to )?(?:no(?! time)|none|little|nothing|second\w*|trivial|beside"
    r"|negligible)\b"
    r"|(?:\b(?:is|are|be|am) not|\b(?:is|are)n't)"
    r" (?!(?:\w+ )?(?:large|big|unlimited|endless|much|great|made|rich|wealthy|high|infinite|a lot"
    r"|expensive|slow|too|costly|long|late|dear|pricey)\b)"
    r"|(?:\bnot|n't) (?:\w+ )?(?:need|needed|necessary|required|have to|play|interest\w*|concern)\b"
    r"|\bneed not be\b|\bhowever (?:long|much|slow|expensive)\b"
)
# "Slow is fine", "it may cost a lot": the clause waives what is disliked, if it is not negated.
PERMITTED = re.compile(
    r"\b(?:fine|ok|okay|all right|alright|acceptable|tolerable|may"
    r"|(?<!you )(?<!\bi )(?<!that )can(?! you)|might"
    r"|allowed|let it"
    r"|welcome|no (?:problem|matter))\b"
)
NEGATED = re.compile(
    r"\b(?:not|never|no|neither|nor|without|avoid\w*|nothing|cannot|hate|dislike)\b|n't\b"
)
# What follows is waived: "even if it is slow", "no matter what it costs", "at any price".
CONCESSION = re.compile(
    r"\b(?:even (?:if|when|though|at|with)|(?:al)?though|albeit|so what if|who cares (?:if|about"
    r"|what|how)|never mind (?:if|that|how|what)|despite|in spite of|regardless of"
    r"|irrespective of|no matter (?:if|how|what|the|whether|that)|whatever|however|at any"
    r"|(?:fine|okay|ok|all right|alright|mind|care|matters?|happens|care less) (?:if|when|that"
    r"|whether)"
    r"|at the (?:expense|cost|price) of|(?:spend|pay) (?:what\w*|as much|freely|any\w*|all))\b"
    r"|\bif (?!you|possible|need)|\b(?:whether|while|granted|notwithstanding|at the risk)\b"
    r"|\b(?:by|with|bother|bothers|trouble|troubles|worries) (?:me|us) (?:if|when|that)\b"
    r"|\b(?:acceptable|problem|worries|worry|object|agree|live with it) (?:if|when|that)\b"
)
# One side is wanted: the second of "rather slow than wrong", the first of "accuracy over speed".
SECOND_WANTED = re.compile(
    r"\b(?:rather|sooner|better)\b.* than |\b(?:sacrifice|trade|give up|swap) .* for "
)
FIRST_WANTED = re.compile(r" (?:over|rather than|instead of|before(?! long| all)|more than) ")
SENTENCE = re.compile(r"(?<=[.;!?]) |[.;!] ?")
CLAUSE = re.compile(
    r"[,:()]| - | – |—| (?:but|so|because|since|yet|only|as long as) "
    r"| and (?=(?:be|do|keep|make|get|give|answer|never|don't|please|there|i (?:want|need)"
    r"|i'd like)\b)"
)
# Clauses that a weight of a half is worded by.
HALF = re.compile(
    r"\ba little\b|\bsomewhat\b|\breasonable\b|\brather\b|\btry\b|\beye on\b|\bif you can\b"
    r"|\btoo long\b|\bbe nice\b|\bcareless\b|\bfairly\b|\bwould suit\b"
)
# Clauses by which a right answer counts a half.
LENIENT = re.compile(
    r"\bguess (?:is|will|would)\b|\bneed not be (?:perfect|exact|right|precise|flawless)"
    r"|\bnot needed\b|\blive with\b|(?<!is )\bgood enough\b(?! for)"
    r"|\bdo not mind an (?:error|mistake)"
)
# Sentences that ask for a balance, whatever else they name.
BALANCE = re.compile(
    r"\bbalanc\w*|\bweigh\b|\bmind both\b|\bcompromise\b|\b(?:middle|golden|happy) (?:way|ground"
    r"|mean|medium|course|path)\b|\btrade-?offs?\b|\bmix\b|\bmoderation\b|\bextremes?\b"
    r"|\bmeasure of all\b|\bbit of (?:everything|all|both|each)\b|\bvalue\b"
    r"|\b(?:no|without) (?:\w+ )?(?:preferences?|wish(?:es)?|priorit(?:y|ies))\b"
    r"|(?:^|, )(?:as you (?:like|wish|please|prefer)|it is up to you|it's up to you|up to you)\b"
    r"|\b(?:you see fit|you think best|decide (?:for )?yourself|you decide|your (?:choice|call))\b"
    r"|\b(?:equally|alike)\b|\bevenly\b|\bhalf and half\b|\bhalfway\b"
)
# The same of sentences that name neither cost nor time: "be reasonable".
MODERATE = re.compile(r"\b(?:moderate|reasonable|sensible|measured|average|middling|ordinary)\b")
# "Summarise the costs of the war", "how fast is light?": what a task is about, no wish.
SUBJECT = re.compile(
    r"\b(?:summari[sz]e|explain|describe|translate|write|compare|discuss|list|define|prove|plot"
    r"|estimate|analy[sz]e|compute|calculate|tell me|research|draft|review|fix|implement)"
    r" (?!(?:it|this|that|them|things|as|at|in|cheap\w*|fast|quick\w*|\w+ly)\b)"
    r"|^(?:how|who|why|when|where|which|is|are|was|did|does|do|what) (?!.*\byou\b).*\?"
)


def weights_in(text: str) -> Weights | None:
    """Returns the weights of outcome, cost and latency that words state; None if they state none.

    What is not mentioned has its usual weight: 1 for the outcome, 0 for cost and latency.
    """
    stated: dict[str, float] = {}
    for sentence in SENTENCE.split(" ".join(_plain(text).split())):
        if SUBJECT.search(sentence):
            continue
        of_sentence = _sentence_weights(sentence.rstrip(" ?"))
        moderate = MODERATE.search(sentence) and not {"cost", "latency"} & {*of_sentence}
        if moderate or BALANCE.search(sentence):
            of_sentence = {"cost": 0.5, "latency": 0.5}
        stated |= of_sentence
    if not stated:
        return None
    return stated.get("outcome", 1.0), stated.get("cost", 0.0), stated.get("latency", 0.0)


def _sentence_weights(sentence: str) -> dict[str, float]:
    """Returns the weights that the clauses of a sentence state, by the name of what they weigh."""
    weights = {}
    for clause in CLAUSE.split(sentence):
        wanted = clause.strip()
        while second := SECOND_WANTED.search(wanted):
            wanted = wanted[second.end() :]
        wanted = CONCESSION.split(FIRST_WANTED.split(wanted)[0])[0]
        weights |= _clause_weights(wanted.strip())
    return weights


def _clause_weights(clause: str) -> dict[str, float]:
    """Returns the weights that one clause states, by the name of what they weigh."""
    if LENIENT.search(clause):
        return {"outcome": 0.5}
    waived = WAIVED.search(clause) or NOT_LIKED.match(clause)
    permitted = PERMITTED.search(clause) and not NEGATED.search(clause)
    weight = 0.5 if HALF.search(clause) else 1.0
    weights = {}
    for name in LIKE:
        rest = DISLIKED[name].sub(" ", clause)
        asked = ASKED[name].search(rest)
        disliked = rest != clause
        if permitted and not LIKED[name].search(clause):
            continue
        if not asked and not disliked:
            continue
        if name != "outcome":
            if not waived:
                weights[name] = weight
        elif not re.search(r"\bright (?:away|now)\b", clause):  # which are about time
            weights["outcome"] = 1.0
    return weights


def words_for(weights: Weights) -> str:
    """Returns sentences for weights, those that policies were trained on.

    Weights count by their ratio to the largest, rounded to 0, 1/2 or 1.
    """
    largest = max(*weights, 1e-9)
    sentences = []
    for (name, default), weight in zip(preferences.DEFAULTS, weights, strict=True):
        rounded = math.floor(2 * weight / largest + 0.5) / 2
        if name == "outcome" and rounded == 0.0:
            rounded = 0.5  # the least that has words
        if rounded != default:
            sentences.append(preferences.PHRASES[name][str(rounded)]["train"][0])
    return " ".join(sentences)


def tool_words(tools: dict[str, float]) -> str:
    """Returns a sentence for the weight of each tool, one that policies were trained on."""
    sentences = []
    for tool, weight in tools.items():
        sign = str(math.copysign(1.0, weight))
        phrase = preferences.PHRASES["tool"][sign]["train"][0]
        sentences.append(phrase.format(tool=tool))
    return " ".join(sentences)


def understood(
    text: str, vector: Json, where: str, names: Collection[str], ban_names: Collection[str]
) -> Preference:
    """Returns the preference of a text and a vector, with words and weights that say the same.

    A weight may have one of `names`, a ban one of `ban_names`. UserError, which begins with
    `where`, for any other.
    """
    preference = Preference.of(text, vector, where, names, ban_names)
    stated = weights_in(text)
    if WEIGHED & {*vector}:
        if stated is None:
            weights = preference.outcome, preference.cost, preference.latency
            preference = replace(preference, text=_joined(text, words_for(weights)))
    elif stated is not None:
        outcome, cost, latency = stated
        preference = replace(preference, outcome=outcome, cost=cost, latency=latency)
    unsaid = {}
    for name, weight in preference.tools.items():
        if weight and name not in text:
            unsaid[name] = weight
    bans = [name for name in bans_in(text, ban_names) if name not in preference.never]
    return replace(
        preference,
        text=_joined(preference.text, tool_words(unsaid)),
        never=[*preference.never, *bans],
    )


def described(preference: Preference) -> str:
    """Returns what a preference weighs and forbids, in a line."""
    weights = {
        "right answer": preference.outcome,
        "low cost": preference.cost,
        "short time": preference.latency,
    }
    weights |= preference.tools
    parts = [f"{name} {weight:g}" for name, weight in weights.items() if weight]
    lines = [f"weights: {', '.join(parts)}"]
    if preference.never:
        lines.append(f"never: {', '.join(preference.never)}")
    if preference.usd is not None:
        lines.append(f"at most ${preference.usd:g}")
    if preference.seconds is not None:
        lines.append(f"at most {preference.seconds:g} s")
    return "; ".join(lines)


def _plain(text: str) -> str:
    return text.casefold().replace("’", "'")


def _joined(*texts: str) -> str:
    return " ".join(text for text in texts if text)
