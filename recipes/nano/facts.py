"""Made-up facts about people, events and things for sale: what reading and extraction ask about.

A fact is a value with sentences that state it and questions that ask for it, so that the answer is
a span of the text. `{n}` is what the fact is about, `{s}` that or its pronoun, `{v}` the value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from recipes.nano.slots import (
    ANIMALS,
    CITIES,
    COLOURS,
    COUNTRIES,
    DAYS,
    EVENTS,
    FOODS,
    HOBBIES,
    JOBS,
    LAST_NAMES,
    OBJECTS,
    PET_NAMES,
    PLACES,
    Draw,
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fact: how its value is drawn, stated and asked for."""

    value: Callable[[Draw], str]
    statements: Sequence[str]
    questions: Sequence[str]


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact about one subject."""

    key: str
    value: str
    statement: str  # with {s} where the subject is
    question: str


@dataclass(frozen=True, slots=True)
class Subject:
    """Subject of facts: a person, an event or a thing."""

    kind: str
    name: str
    pronoun: str
    facts: Sequence[Fact]

    def text(self, draw: Draw) -> str:
        """State the facts in their order; later sentences may have a pronoun."""
        said = [
            fact.statement.replace("{s}", self.name if not i or draw.chance(0.3) else self.pronoun)
            for i, fact in enumerate(self.facts)
        ]
        return " ".join(sentence[0].upper() + sentence[1:] for sentence in said)

    def values(self) -> dict[str, str]:
        return {"name": self.name.removeprefix("the "), **{f.key: f.value for f in self.facts}}


def number(low: int, high: int) -> Callable[[Draw], str]:
    return lambda draw: str(draw.rng.randint(low, high))


def one_of(options: Sequence[str]) -> Callable[[Draw], str]:
    return lambda draw: draw.pick(options)


PERSON: Mapping[str, Kind] = {
    "age": Kind(
        number(6, 90),
        ["{s} is {v} years old.", "{s} turned {v} this year.", "{s} is now {v}."],
        ["How old is {n}?", "What is {n}'s age?", "What age is {n}?", "Tell me how old {n} is."],
    ),
    "city": Kind(
        one_of(CITIES),
        ["{s} lives in {v}.", "{s} has a flat in {v}.", "{s} moved to {v} last year."],
        [
            *("Where does {n} live?", "In which city does {n} live?", "What city is {n} in?"),
            *("Which city is {n}'s home?", "Where is {n}'s home?", "What is {n}'s city?"),
        ],
    ),
    "job": Kind(
        one_of(JOBS),
        ["{s} works as a {v}.", "{s} is a {v} by trade.", "{s} found a job as a {v}."],
        [
            *("What is {n}'s job?", "What does {n} do for a living?", "What does {n} work as?"),
            *("What kind of work does {n} do?", "What is {n}'s profession?"),
        ],
    ),
    "hobby": Kind(
        one_of(HOBBIES),
        ["{s} loves {v}.", "{s} spends the weekend {v}.", "{s} enjoys {v} after work."],
        [
            *("What is {n}'s hobby?", "What does {n} enjoy?", "What does {n} like to do?"),
            *("What does {n} do for fun?", "How does {n} spend free time?"),
        ],
    ),
    "food": Kind(
        one_of(FOODS),
        ["{s} likes to eat {v}.", "{s} often orders {v}.", "{s} could eat {v} every day."],
        [
            *("What does {n} like to eat?", "What food does {n} like?", "What does {n} often eat?"),
            *("What is {n}'s favourite food?", "Which food does {n} prefer?"),
        ],
    ),
    "pet": Kind(
        one_of(ANIMALS),
        ["{s} has a {v} at home.", "{s} owns a {v}.", "{s} takes care of a {v}."],
        [
            *("What pet does {n} have?", "Which animal does {n} own?", "What animal has {n} got?"),
            *("What kind of pet has {n}?", "Which pet lives with {n}?"),
        ],
    ),
    "pet_name": Kind(
        one_of(PET_NAMES),
        ["{s} calls the pet {v}.", "{s} named the pet {v}.", "{s} walks with {v}, the pet."],
        [
            *("What is the name of {n}'s pet?", "What is {n}'s pet called?"),
            *("What did {n} name the pet?", "How is {n}'s pet called?", "Who is {n}'s pet?"),
        ],
    ),
    "colour": Kind(
        one_of(COLOURS),
        ["{s} always wears {v}.", "{s} painted the door {v}.", "{s} bought a {v} coat."],
        [
            *("Which colour does {n} like?", "What colour is {n} fond of?"),
            *("What colour did {n} choose?", "What is {n}'s colour?", "What colour suits {n}?"),
        ],
    ),
    "friend": Kind(
        lambda draw: draw.person()[0],
        ["{s} has a friend called {v}.", "{s} is best friends with {v}.", "{s} often meets {v}."],
        [
            *("Who is {n}'s friend?", "What is the name of {n}'s friend?", "Who is {n} close to?"),
            *("Whom does {n} know well?", "Who does {n} often meet?"),
        ],
    ),
    "trip": Kind(
        one_of(COUNTRIES),
        ["{s} wants to travel to {v}.", "{s} went to {v} last summer.", "{s} dreams of {v}."],
        [
            *("Which country is on {n}'s mind?", "Where does {n} travel?"),
            *("What country does {n} talk about?", "To which country does {n} go?"),
            "Which country does {n} want to see?",
        ],
    ),
}
EVENT: Mapping[str, Kind] = {
    "day": Kind(
        lambda draw: draw.any(DAYS),
        ["{s} is on {v}.", "{s} takes place on {v}.", "{s} will be held on {v}."],
        [
            *("When is {n}?", "On which day is {n}?", "What day is {n}?"),
            *("Which day is {n} on?", "What day does {n} take place?"),
        ],
    ),
    "time": Kind(
        Draw.time,
        ["{s} begins at {v}.", "{s} starts at {v}.", "Doors for {s} open at {v}."],
        [
            *("What time is {n}?", "At what time does {n} begin?", "When does {n} start?"),
            *("What is the starting time of {n}?", "How late does {n} begin?"),
        ],
    ),
    "place": Kind(
        one_of(PLACES),
        ["{s} is held at {v}.", "{s} takes place near {v}.", "People meet for {s} at {v}."],
        [
            *("Where is {n}?", "Where does {n} take place?", "What is the place of {n}?"),
            *("At what place is {n}?", "Where do people go for {n}?"),
        ],
    ),
    "price": Kind(
        Draw.price,
        ["A ticket for {s} costs {v}.", "The entry to {s} is {v}.", "Visitors of {s} pay {v}."],
        [
            *("How much does {n} cost?", "What is the price of {n}?", "How much is {n}?"),
            *("What do visitors of {n} pay?", "How expensive is {n}?"),
        ],
    ),
    "organizer": Kind(
        lambda draw: f"{draw.person()[0]} {draw.pick(LAST_NAMES)}",
        ["{v} organizes {s}.", "{s} is organized by {v}.", "{v} is in charge of {s}."],
        [
            *("Who organizes {n}?", "Who is in charge of {n}?", "Who runs {n}?"),
            *("Who is the organizer of {n}?", "Who is responsible for {n}?"),
        ],
    ),
    "guests": Kind(
        number(8, 400),
        ["About {v} people will come to {s}.", "There is room for {v} guests at {s}."],
        [
            *("How many people come to {n}?", "How many guests can {n} have?"),
            *("How many guests does {n} expect?", "For how many people is {n}?"),
            "What is the number of guests at {n}?",
        ],
    ),
}
THING: Mapping[str, Kind] = {
    "price": Kind(
        Draw.price,
        ["{s} costs {v}.", "The price of {s} is {v}.", "{s} is sold for {v}."],
        [
            *("How much is {n}?", "What does {n} cost?", "What is the price of {n}?"),
            *("How much money is {n}?", "For how much is {n} sold?"),
        ],
    ),
    "colour": Kind(
        one_of(COLOURS),
        ["{s} is {v}.", "The colour of {s} is {v}.", "{s} comes in {v}."],
        [
            *("What colour is {n}?", "Which colour has {n}?", "What is the colour of {n}?"),
            *("In which colour is {n}?", "What colour does {n} have?"),
        ],
    ),
    "maker": Kind(
        lambda draw: draw.pick(LAST_NAMES),
        ["{s} was made by {v}.", "{v} is the maker of {s}.", "{s} comes from the firm {v}."],
        [
            *("Who made {n}?", "Which firm makes {n}?", "Who is the maker of {n}?"),
            *("What firm is {n} from?", "Who built {n}?"),
        ],
    ),
    "city": Kind(
        one_of(CITIES),
        ["{s} is sold in {v}.", "The shop with {s} is in {v}.", "{s} was found in {v}."],
        [
            *("In which city is {n}?", "Where can one buy {n}?", "Where is {n} sold?"),
            *("What city is {n} in?", "Which city has {n}?"),
        ],
    ),
    "year": Kind(
        number(1890, 2025),
        ["{s} is from {v}.", "{s} was built in {v}.", "{s} dates from {v}."],
        [
            *("When was {n} made?", "From which year is {n}?", "What year is {n} from?"),
            *("How old is {n}?", "In what year was {n} built?"),
        ],
    ),
    "weight": Kind(
        lambda draw: f"{draw.rng.randint(2, 60)} {draw.any(('kilos', 'pounds', 'grams'))}",
        ["{s} weighs {v}.", "The weight of {s} is {v}."],
        [
            *("How heavy is {n}?", "What does {n} weigh?", "How much does {n} weigh?"),
            *("What is the weight of {n}?", "Tell me the weight of {n}."),
        ],
    ),
}


def draw_subject(draw: Draw, kind: str, name: str, pronoun: str, count: int) -> Subject:
    """Draw `count` facts about a subject."""
    kinds = {"person": PERSON, "event": EVENT, "thing": THING}[kind]
    keys = draw.rng.sample(list(kinds), min(count, len(kinds)))
    if "pet_name" in keys and "pet" not in keys:
        keys[keys.index("pet_name")] = "pet"
    facts = [draw_fact(draw, key, kinds[key], name) for key in keys]
    return Subject(kind, name, pronoun, facts)


def draw_fact(draw: Draw, key: str, kind: Kind, name: str) -> Fact:
    value = kind.value(draw)
    statement = draw.any(kind.statements).replace("{v}", value)
    for vowel in "aeiou":
        statement = statement.replace(f" a {vowel}", f" an {vowel}")
    question = draw.phrase(
        [f"[{one}|{one}|{one}|Tell me: {one}|Please tell me: {one}]" for one in kind.questions]
    )
    return Fact(key, value, statement, question.replace("{n}", name))


def draw_subjects(draw: Draw, count: int, facts: int, kind: str | None = None) -> list[Subject]:
    """Draw subjects of one kind, each with the same number of facts."""
    kind = kind or draw.any(("person", "person", "event", "thing"))
    named: list[tuple[str, str]]
    if kind == "person":
        named = draw.people(count)
    else:
        nouns = draw.picks(EVENTS if kind == "event" else OBJECTS, count)
        named = [(f"the {noun}", "it") for noun in nouns]
    return [draw_subject(draw, kind, name, pronoun, facts) for name, pronoun in named]


def mixed_text(draw: Draw, subjects: Sequence[Subject]) -> str:
    """Write all subjects' facts into one paragraph, subject by subject."""
    return " ".join(subject.text(draw) for subject in subjects)
