"""Forms of common verbs, to change tense and to ask about sentences by program."""

from __future__ import annotations

import re

# Base and past; third person and participle follow by rule. Verbs whose forms are ambiguous with
# other words ("leaves", "left", "saw") are kept only where a sentence shows which is meant.
IRREGULAR = dict(
    pair.split(":")
    for pair in (
        "go:went come:came see:saw take:took make:made give:gave get:got know:knew think:thought "
        "say:said tell:told find:found keep:kept feel:felt bring:brought buy:bought catch:caught "
        "teach:taught sleep:slept eat:ate drink:drank sing:sang swim:swam begin:began run:ran "
        "sit:sat stand:stood write:wrote drive:drove ride:rode speak:spoke break:broke wear:wore "
        "choose:chose forget:forgot fall:fell hold:held grow:grew throw:threw fly:flew draw:drew "
        "build:built send:sent spend:spent lend:lent lose:lost sell:sold win:won meet:met pay:paid "
        "hear:heard understand:understood become:became wake:woke steal:stole hide:hid bite:bit "
        "shake:shook have:had do:did lead:led mean:meant fight:fought feed:fed dig:dug"
    ).split()
)
REGULAR = (
    "walk talk play work like love want need look help ask answer call visit live enjoy hate open "
    "close wash clean cook wait laugh smile cry jump dance listen watch start finish learn study "
    "try use move turn stay rain snow believe remember seem happen paint pull push pick pass plan "
    "stop carry marry worry hurry reply thank touch travel enter explain fill fix follow join kick "
    "kiss knock lock miss order park plant point prefer promise raise reach receive refuse rest "
    "return save share shout smell smoke sound stare study suggest taste train wish wonder admire "
    "agree apologize appear argue arrive attend bake belong boil borrow breathe brush change check "
    "collect compare complain continue count cover cross decide deliver depend describe deserve "
    "discover discuss drop earn escape expect fail guess hope ignore improve invite kill land last "
    "lie lift notice offer own practice prepare press protect prove remind repair rescue respect "
    "scream search shave sign solve spell support surprise suspect translate trust warn waste "
    "whisper yell"
).split()
DOUBLED = {"plan", "stop", "drop", "prefer", "travel"} - {"travel"}
AMBIGUOUS = {"lie", "found", "felt", "ground", "last", "saw"}


def third(verb: str) -> str:
    """Return the form of he, she, it."""
    if verb in ("have", "do", "go"):
        return {"have": "has", "do": "does", "go": "goes"}[verb]
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + ("es" if verb.endswith(("s", "sh", "ch", "x", "z")) else "s")


def regular_past(verb: str) -> str:
    if verb.endswith("e"):
        return verb + "d"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ied"
    return verb + (verb[-1] if verb in DOUBLED else "") + "ed"


PAST = {
    **IRREGULAR,
    **{verb: regular_past(verb) for verb in REGULAR if verb not in AMBIGUOUS},
}
BASE_OF_PAST = {past: base for base, past in PAST.items() if past not in AMBIGUOUS}
BASE_OF_THIRD = {third(base): base for base in PAST}
BE_PAST = {"is": "was", "are": "were", "am": "was"}
# Forms of any of these verbs, or a helper: a clause with one more of them has a second verb.
FINITE = frozenset(
    {*PAST, *PAST.values(), *BASE_OF_THIRD}
    | set("is are am was were be been will would can could may might must shall should".split())
    | {"don't", "doesn't", "didn't", "isn't", "aren't", "wasn't", "weren't", "won't", "can't"}
)
JOINING = re.compile(
    r"\b(that|who|which|when|than|if|now|today|tomorrow|tonight|yesterday|ago|what|where|why|how|"
    r"because|while|until|since|so|and|but|or|to|never|ever|already|yet|please|let|let's)\b|[\"]"
)
