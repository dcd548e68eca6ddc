"""Rewrites of sentences with one right result by rule: tense, politeness, length, case, words.

Each rewrite takes a sentence and returns the instruction and the result, or None where its rule
does not hold. `recipes.nano.prose_tasks` has edits of longer texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from dgemma.eval.spans import rename_word
from recipes.nano.raw import Pair
from recipes.nano.rewrite import plant_errors
from recipes.nano.slots import (
    ANIMALS,
    BOYS,
    CITIES,
    COLOURS,
    DAYS,
    GIRLS,
    MONTHS,
    OBJECTS,
    Draw,
)
from recipes.nano.verbs import BASE_OF_PAST, BASE_OF_THIRD, BE_PAST, FINITE, JOINING, PAST, third

Rewrite = tuple[str, str]  # instruction and result
PUT = [
    "{what}\n\n{text}",
    "{what}\n{text}",
    "{what} {text}",
    "{text}\n\n{what}",
    "{text}\n{what}",
    "{what}\n\nText: {text}",
    "{what} Text: {text}",
    "Text: {text}\n{what}",
    "Sentence: {text}\n\n{what}",
    '{what}\n\n"{text}"',
    '{what} "{text}"',
    '"{text}"\n{what}',
    "Please do this: {what}\n\n{text}",
]
IT = "[this|it|this sentence|the sentence|this text|the text|the following]"
CHANGE = "[Put|Write|Rewrite|Change|Turn|Convert|Make|Say|Please put|Please write|Can you put]"
END = "[.|.|, please.|!|:]"
TO_PAST = [
    f"{CHANGE} {IT} [in|into|to] [the past tense|past tense|the past|the simple past]{END}",
    f"[Past tense|In the past tense|Use the past tense|Make {IT} past tense]{END}",
    f"[Write|Say|Tell|Rewrite] {IT} as if it [happened|was] [yesterday|last year|long ago]{END}",
    f"[What is|How do I say|What would be] {IT} in the past tense?",
]
TO_PRESENT = [
    f"{CHANGE} {IT} [in|into|to] [the present tense|present tense|the present]{END}",
    f"[Present tense|In the present tense|Use the present tense|Make {IT} present tense]{END}",
    f"[Write|Say|Tell|Rewrite] {IT} as if it [happens|is] [now|today|every day]{END}",
    f"[What is|How do I say|What would be] {IT} in the present tense?",
]
TO_FUTURE = [
    f"{CHANGE} {IT} [in|into|to] [the future tense|future tense|the future]{END}",
    f"[Future tense|In the future tense|Use the future tense|Rewrite {IT} with will]{END}",
    f"[Write|Say|Tell|Rewrite] {IT} as if it [happens|is] [tomorrow|next year|next week]{END}",
    f"[What is|How do I say|What would be] {IT} in the future tense?",
]
POLITE = [
    f"[Make|Rewrite|Can you make|Please make] {IT} [more polite|politer|friendlier|nicer]{END}",
    f"[Make|Let] {IT} sound [more polite|politer|friendlier|nicer]{END}",
    f"[Say|Write|Rewrite|Ask|Put] {IT} [politely|more politely|in a polite way|nicely]{END}",
    f"[Turn|Change|Rewrite|Convert] {IT} into a polite [question|request]{END}",
    f"How [can|do|would] I [say|ask|write] {IT} [more politely|politely|in a nicer way]?",
    f"[More polite|Politer|Be polite|A polite version]{END}",
]
SHORTER = [
    f"[Make|Can you make|Please make] {IT} [shorter|more concise|briefer|short]{END}",
    f"[Shorten|Cut|Trim|Condense] {IT}{END}",
    f"[Say|Write|Rewrite|Put] {IT} [in fewer words|more briefly|with fewer words|shorter]{END}",
    f"[Cut|Remove|Leave out|Drop] what is not needed[.| here.| in {IT}.]",
    f"[Shorter|More concise|In fewer words|A shorter version]{END}",
]
SIMPLER = [
    f"[Make|Can you make|Please make] {IT} [simpler|easier|easier to read|plainer]{END}",
    f"[Say|Write|Rewrite|Put] {IT} [in simple words|in simpler words|more simply|simply]{END}",
    f"[Simplify|Use simpler words in|Use easy words for] {IT}{END}",
    f"[Rewrite|Say|Explain] {IT} [so that a child understands it|for a child|for a beginner]{END}",
    f"[Simpler|In simple words|A simpler version|Simple English]{END}",
]
NEGATIVE = [
    f"[Make|Turn|Change|Rewrite] {IT} [negative|into a negative sentence|to the negative]{END}",
    f"[Negate|Deny] {IT}{END}",
    f"[Rewrite|Say|Write|Put] {IT} with [not|a not|the word not]{END}",
    f"[Turn|Change] {IT} into its opposite with not{END}",
    f"Say that [this|it] is not [so|true|the case]{END}",
]
QUESTION = [
    f"[Turn|Change|Rewrite|Convert|Make] {IT} into a question{END}",
    f"[Make|Form] [a question of|a question from|a question out of] {IT}{END}",
    f"[Ask|Write|Rewrite|Put|Say] {IT} as a question{END}",
    f"[Question form|As a question|Make it a question]{END}",
]
UPPER = [
    f"[Write|Put|Rewrite|Say|Type] {IT} in [capital letters|capitals|all caps|upper case]{END}",
    f"[Change|Convert|Turn] {IT} [to|into] [upper case|capital letters|all caps|capitals]{END}",
    f"[Make {IT} all caps|Use capital letters only|Put everything in upper case|All caps]{END}",
]
LOWER = [
    f"[Write|Put|Rewrite|Say|Type] {IT} in [small letters|lower case|lowercase]{END}",
    f"[Change|Convert|Turn] {IT} [to|into] [small letters|lower case|lowercase]{END}",
    f"[Make {IT} lower case|Use small letters only|Put everything in lower case|No capitals]{END}",
]
REPLACE = [
    '[Replace|Swap|Substitute] ["{a}"|{a}|the word {a}|the word "{a}"] [with|by|for] {b}[.|]',
    '[Change|Turn] ["{a}"|{a}|the word {a}] [to|into] ["{b}"|{b}][.|!|]',
    "[Use|Put|Write] {b} [instead of|in place of|for] {a}[.|]",
    "[Write|Say|Use] {b}, not {a}[.|]",
    "{a} [should be|must be|becomes] {b}[.|]",
    "[Rename|Please change|Can you change] {a} to {b}[.|]",
]
REMOVE = [
    '[Remove|Delete|Drop|Erase|Take out|Leave out|Cut] [the word |]["{a}"|{a}][.|, please.|]',
    '[Write|Say|Rewrite] [this|it] without [the word |]["{a}"|{a}][.|]',
]
CORRECT = [
    f"[Correct|Fix|Repair|Find and correct] [the mistakes|the typos|the errors|the spelling]{END}",
    f"[Correct|Proofread|Fix|Check|Please correct] {IT}{END}",
    f"[Correct|Fix] the [mistakes|typos|errors|spelling] in {IT}{END}",
    f"[Write|Rewrite|Copy] {IT} without [mistakes|typos|errors]{END}",
    f"There [is a mistake|are mistakes|is a typo] [here|in {IT}]. [Correct|Fix] it[.|!]",
]
PRONOUNS = ("You", "He", "She", "We", "They", "It")
SUBJECT = r"((?:The|My|Your|His|Her|Our|Their) [a-z]+|[A-Z][a-z]+|I)"
CONTRACTED = re.compile(r"n't|'(?:ll|m|re|ve|d)\b")
CLAUSE = re.compile(
    rf"^{SUBJECT} ((?:often|always|sometimes|usually|still|also) )?([a-z]+)( .+)?\.$"
)


def clause(text: str) -> tuple[str, str, str, str] | None:
    """Split subject, adverb, verb and rest of a sentence with a single verb."""
    match = CLAUSE.match(text)
    if match is None or len(text) > 90 or JOINING.search(text) or CONTRACTED.search(text):
        return None
    subject, adverb, verb, rest = match[1], match[2] or "", match[3], match[4] or ""
    if FINITE & set(re.findall(r"[a-z']+", f"{rest.lower()} {subject.lower()}")):
        return None
    return subject, adverb, verb, rest


def is_plural(subject: str) -> bool:
    return subject in ("I", "You", "We", "They") or (" " in subject and subject.endswith("s"))


def to_past(text: str, draw: Draw) -> Rewrite | None:
    parts = clause(text)
    if parts is None:
        return None
    subject, adverb, verb, rest = parts
    base = BASE_OF_THIRD.get(verb, verb if is_plural(subject) else "")
    past = BE_PAST.get(verb) or PAST.get(base)
    if verb == "are" and subject == "You":
        past = "were"
    if past is None or past == verb:
        return None
    return draw.phrase(TO_PAST), f"{subject} {adverb}{past}{rest}."


def to_present(text: str, draw: Draw) -> Rewrite | None:
    parts = clause(text)
    if parts is None or parts[2] not in BASE_OF_PAST or parts[2] in BASE_OF_PAST.values():
        return None
    subject, adverb, verb, rest = parts
    base = BASE_OF_PAST[verb]
    return draw.phrase(
        TO_PRESENT
    ), f"{subject} {adverb}{base if is_plural(subject) else third(base)}{rest}."


def to_future(text: str, draw: Draw) -> Rewrite | None:
    parts = clause(text)
    if parts is None:
        return None
    subject, adverb, verb, rest = parts
    base = "be" if verb in BE_PAST else BASE_OF_THIRD.get(verb) or BASE_OF_PAST.get(verb)
    if base is None and is_plural(subject) and verb in PAST:
        base = verb
    if base is None:
        return None
    return draw.phrase(TO_FUTURE), f"{subject} will {adverb}{base}{rest}."


IMPERATIVE = re.compile(r"^([A-Z][a-z]+)((?: [A-Za-z'0-9]+){1,8})[.!]$")


def polite(text: str, draw: Draw) -> Rewrite | None:
    match = IMPERATIVE.match(text)
    if (
        match is None
        or match[1].lower() not in PAST
        or match[1] in ("Like", "Mean", "Saw", "Thank")
    ):
        return None
    if FINITE & set(match[2].split()) or JOINING.search(match[2]):
        return None
    return draw.phrase(POLITE), f"Could you please {match[1].lower()}{match[2]}?"


EXTRA = re.compile(
    r" (very|really|quite|just|actually|rather|simply|totally|extremely|certainly|definitely|"
    r"absolutely|completely|probably|basically|literally|truly)(?= [a-z])"
)
TAIL = re.compile(r",? (?:because|although|even though|since|while|whereas) .+(?=[.!]$)")


def shorter(text: str, draw: Draw) -> Rewrite | None:
    cut = TAIL.sub("", EXTRA.sub("", text))
    if cut == text or len(cut.split()) < 3 or re.search(r"\b(not|so|a|an)$", cut.rstrip(".!")):
        return None
    if re.search(r"\b(not|a|an) (very|really|quite|just|rather)\b", text):
        return None
    return draw.phrase(SHORTER), cut


# Words that have a plainer one for the same place in a sentence.
PLAINER = dict(
    pair.split(":")
    for pair in (
        "purchase:buy purchased:bought obtain:get obtained:got assist:help assistance:help "
        "attempt:try attempted:tried attempts:tries require:need requires:needs required:needed "
        "commence:begin commenced:began numerous:many approximately:about sufficient:enough "
        "additional:more frequently:often however:but therefore:so physician:doctor "
        "physicians:doctors automobile:car automobiles:cars residence:home reside:live "
        "resides:lives demonstrate:show demonstrated:showed demonstrates:shows inquire:ask "
        "inquired:asked respond:answer responded:answered conclude:end concluded:ended "
        "observe:see observed:saw possess:have possesses:has possessed:had enormous:huge "
        "immense:huge intelligent:clever entire:whole entirely:wholly rapidly:quickly "
        "immediately:now beverage:drink beverages:drinks error:mistake errors:mistakes "
        "wealthy:rich difficult:hard difficulty:trouble endeavor:try permit:let permitted:let "
        "perspire:sweat converse:talk conversation:talk occupation:job currently:now "
        "previously:before subsequently:later prior:earlier donate:give donated:gave "
        "encounter:meet encountered:met regarding:about exhausted:tired furious:angry "
        "anxious:worried terrified:scared delighted:happy miserable:sad ancient:old "
        "infant:baby infants:babies select:choose selected:chose reveal:show revealed:showed "
        "vehicle:car vehicles:cars discover:find discovered:found completed:finished "
        "complete:finish construct:build constructed:built retain:keep retained:kept "
        "comprehend:understand terminate:end accurate:right incorrect:wrong correct:right"
    ).split()
)
LONG_WORD = re.compile(rf"\b({'|'.join(PLAINER)})\b")


def simpler(text: str, draw: Draw) -> Rewrite | None:
    if not LONG_WORD.search(text) or len(text) > 120 or re.search(r"\ban? (error|intell)", text):
        return None
    return draw.phrase(SIMPLER), LONG_WORD.sub(lambda match: PLAINER[match[0]], text)


BE = re.compile(rf"^{SUBJECT} (is|are|was|were|am|can|will|should|must) (?!not\b)([^,;]+)\.$")


def _be(text: str) -> re.Match[str] | None:
    match = BE.match(text)
    if match is None or len(text) > 80 or JOINING.search(match[3]):
        return None
    return match


def negative(text: str, draw: Draw) -> Rewrite | None:
    match = _be(text)
    if match is None or re.search(r"\b(no|not|never|some|nothing|nobody)\b|n't", text):
        return None
    return draw.phrase(NEGATIVE), f"{match[1]} {match[2]} not {match[3]}."


def question(text: str, draw: Draw) -> Rewrite | None:
    match = _be(text)
    if match is None or match[2] in ("am", "must"):
        return None
    first, *more = match[1].split()
    is_name = first in ("I", "Tom", "Mary", "Sami", "Ziri", "Yanni") or first in (*GIRLS, *BOYS)
    if not (is_name or more or first in PRONOUNS):
        return None
    subject = " ".join([first if is_name else first.lower(), *more])
    return draw.phrase(QUESTION), f"{match[2].capitalize()} {subject} {match[3]}?"


def upper(text: str, draw: Draw) -> Rewrite | None:
    return (draw.phrase(UPPER), text.upper()) if len(text) < 90 else None


def lower(text: str, draw: Draw) -> Rewrite | None:
    return (draw.phrase(LOWER), text.lower()) if text != text.lower() else None


GROUPS: Sequence[Sequence[str]] = (GIRLS, BOYS, CITIES, COLOURS, DAYS, MONTHS, ANIMALS, OBJECTS)
NOT_ALWAYS = {"Will", "May", "March", "Mark", "April", "June", "Nice", "Cork", "watch", "orange"}
GROUP_OF = {w: group for group in GROUPS for w in group if " " not in w and w not in NOT_ALWAYS}


def replace(text: str, draw: Draw) -> Rewrite | None:
    """Replace a word by another of its group: a name by a name, a colour by a colour."""
    known = [word for word in set(re.findall(r"[A-Za-z]+", text)) if word in GROUP_OF]
    if not known:
        return None
    old = draw.any(sorted(known))
    alike = [
        word
        for word in draw.side(GROUP_OF[old])
        if word not in text and (word[0] in "aeiou") == (old[0] in "aeiou")
    ]
    if not alike:
        return None
    new = draw.any(alike)
    return draw.phrase(REPLACE).format(a=old, b=new), rename_word(text, old, new)


def remove(text: str, draw: Draw) -> Rewrite | None:
    words = re.findall(r"(?<= )[a-z]{3,}(?= )", text)
    once = [word for word in words if len(re.findall(rf"\b{word}\b", text)) == 1]
    if not once or len(text.split()) < 5:
        return None
    word = draw.any(once)
    return draw.phrase(REMOVE).format(a=word), text.replace(f" {word} ", " ", 1)


def corrected(text: str, draw: Draw) -> tuple[str, str, str] | None:
    """Return instruction, a text with planted errors and the original."""
    words = len(text.split())
    wrong = plant_errors(text, draw.rng, draw.rng.randint(1, max(1, words // 5)))
    return None if wrong is None else (draw.phrase(CORRECT), wrong, text)


REWRITES: Sequence[Callable[[str, Draw], Rewrite | None]] = (
    *(to_past, to_past, to_present, to_future, polite, polite, shorter, shorter, simpler),
    *(simpler, negative, question, upper, lower, replace, replace, remove),
)


def rewrite_pairs(draw: Draw, sentences: Sequence[str], count: int) -> Iterator[Pair]:
    """Rewrite sentences, of each kind about as many as `REWRITES` has entries of it."""
    made, tried = 0, 0
    while made < count and tried < 60 * count:
        rule = draw.any(REWRITES)
        for _ in range(40):
            tried += 1
            text = draw.any(sentences)
            result = rule(text, draw)
            if result is not None and result[1] != text:
                what, reply = result
                made += 1
                prompt = draw.any(PUT).format(what=what, text=text)
                yield {"prompt": prompt, "reply": reply, "kind": rule.__name__}
                break


def correction_pairs(draw: Draw, texts: Sequence[str], count: int) -> Iterator[Pair]:
    """Plant errors in texts and ask for the originals."""
    for text in draw.rng.sample(list(texts), min(count, len(texts))):
        made = corrected(text, draw)
        if made is not None:
            what, wrong, right = made
            yield {"prompt": draw.any(PUT).format(what=what, text=wrong), "reply": right}
