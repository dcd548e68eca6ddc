"""Short e-mails and notes about a given occasion, with all that the user wants said in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recipes.nano.raw import Pair
from recipes.nano.slots import DAYS, EVENTS, FOODS, OBJECTS, PLACES, Draw

ASK = [
    "[Write|Draft|Compose] [a short email|an email|a brief e-mail|a message] to {n}: {say}",
    "[Write|Draft] [an email|an e-mail|a message] to {n}. [Tell {n} that|Say that] {say}",
    "[Tell|Write to] {n} [by email|in a short email|in a message] that {say}",
    "[Email|Message|Note] to {n}[, please|]: {say}",
    "[Write|Leave] a [short |]note for {n} that says that {say}",
]
SIGNED = ["[Sign it|Sign] with {me}[.|]", "[From|By] {me}[.|]", "My name is {me}[.|]"]
HELLO = ("Hi {n},", "Hello {n},", "Dear {n},")
BYE = ("Best regards", "Kind regards", "Best wishes", "All the best", "Thanks and best regards")
# What the user wants said, the sentences that say it, and one to close with; {} are values.
Occasion = tuple[str, Sequence[str], Sequence[str]]
OCCASIONS: Sequence[Occasion] = (
    (
        "the {e} on {d} is moved to {d2}",
        ["I wanted to let you know that the {e} on {d} is moved to {d2}."],
        ["I hope that works for you.", "Please tell me if that is a problem."],
    ),
    (
        "I am ill and can't come on {d}",
        ["I am sorry, but I am ill and can't come on {d}."],
        ["I hope we can find another day.", "Please say hello to the others."],
    ),
    (
        "we meet on {d} at {t} at {p}",
        ["We meet on {d} at {t} at {p}."],
        ["I look forward to seeing you.", "See you there!"],
    ),
    (
        "thank you for the {o}",
        ["Thank you very much for the {o}.", "Thank you so much for the {o}."],
        ["It was very kind of you.", "I like it a lot."],
    ),
    (
        "I will be late, about {m} minutes",
        ["I will be about {m} minutes late."],
        ["Please start without me.", "I am sorry about that."],
    ),
    (
        "you are invited to the {e} on {d} at {t}",
        ["You are invited to the {e} on {d} at {t}."],
        ["I would be glad if you came.", "Please tell me if you can come."],
    ),
    (
        "the {o} has arrived and is at {p}",
        ["The {o} has arrived and is at {p}."],
        ["You can get it at any time.", "Please pick it up soon."],
    ),
    (
        "please bring {f} on {d}",
        ["Could you please bring {f} on {d}?"],
        ["Thank you for your help.", "That would be a great help."],
    ),
    (
        "I can't find my {o}, it may be at {p}",
        ["I can't find my {o}. It may be at {p}."],
        ["Could you please look for it?", "Please tell me if you see it."],
    ),
    (
        "congratulations on the new job",
        ["Congratulations on the new job!"],
        ["You have earned it.", "I am very happy for you."],
    ),
    (
        "the meeting at {t} is cancelled",
        ["The meeting at {t} is cancelled."],
        ["I will write again with a new date.", "Sorry for the late notice."],
    ),
    (
        "can I have {d} off, I want to visit {p}",
        ["Could I have {d} off? I would like to visit {p}."],
        ["Thank you for your answer.", "Please tell me if that is possible."],
    ),
    (
        "the bill of {c} is not paid yet",
        ["This is a friendly reminder that the bill of {c} is not paid yet."],
        ["Please pay it soon.", "If you have paid already, please ignore this."],
    ),
    (
        "happy birthday",
        ["Happy birthday!"],
        ["I wish you all the best for the new year.", "I hope you have a wonderful day."],
    ),
    (
        "the {o} is broken, please send a new one",
        ["The {o} is broken. Could you please send me a new one?"],
        ["Thank you for your help.", "I look forward to your answer."],
    ),
    (
        "I would like to buy the {o} for {c}",
        ["I would like to buy the {o} for {c}."],
        ["Is it still there?", "Please tell me when I can get it."],
    ),
)


def letter_pairs(draw: Draw, count: int) -> Iterator[Pair]:
    """Ask for an e-mail or a note with a name, an occasion and sometimes a signature."""
    for _ in range(count):
        said, sentences, endings = draw.any(OCCASIONS)
        values = occasion_values(draw)
        (name, _), (me, _) = draw.people(2)
        asked = draw.phrase(ASK).format(n=name, say=said.format(**values))
        is_signed = draw.chance(0.4)
        if is_signed:
            asked = f"{asked.rstrip('.')}. {draw.phrase(SIGNED).format(me=me)}"
        body = f"{draw.any(sentences).format(**values)} {draw.any(endings)}"
        bye = draw.any(BYE) + (f"\n{me}" if is_signed else "")
        reply = f"{draw.any(HELLO).format(n=name)}\n\n{body}\n\n{bye}"
        yield {"prompt": asked, "reply": reply}


def occasion_values(draw: Draw) -> dict[str, object]:
    first, second = draw.rng.sample(DAYS, 2)
    thing = draw.pick(OBJECTS)
    return {
        **{"e": draw.pick(EVENTS), "d": first, "d2": second, "t": draw.time()},
        **{"p": draw.pick(PLACES), "o": thing, "f": draw.pick(FOODS), "c": draw.price()},
        **{"m": draw.rng.randint(1, 12) * 5},
    }
