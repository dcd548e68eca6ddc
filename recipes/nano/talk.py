"""Small talk: conversations of one to five exchanges, some of which need an earlier one.

An exchange is what the user says and what the assistant replies; `Talk` remembers what the user
told, so that a later exchange can ask for it. Every conversation gives one example per reply drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from recipes.nano.slots import (
    ANIMALS,
    CITIES,
    COLOURS,
    DAYS,
    DRINKS,
    FOODS,
    HOBBIES,
    JOBS,
    OBJECTS,
    PET_NAMES,
    Draw,
    article,
)
from recipes.nano.talk_lines import (
    ABOUT_ME,
    ADVICE,
    ANSWERS,
    CHOICES,
    DEFINITIONS,
    FAREWELLS,
    FEELINGS,
    GREETINGS,
    HOW_ARE_YOU,
    JOKES,
    OPPOSITES,
    SOUNDS,
    THANKS,
    WEATHER,
)

Chat = dict[str, object]


@dataclass
class Talk:
    """A conversation in progress, and what the user told: (questions, reply, value)."""

    draw: Draw
    lines: list[tuple[str, str]] = field(default_factory=list)
    told: dict[str, tuple[Sequence[str], str, str]] = field(default_factory=dict)
    name: str = ""
    recalls: dict[int, str] = field(default_factory=dict)  # exchange that recalls: the value

    def say(self, user: str, reply: str) -> None:
        self.lines.append((user, reply))

    def address(self, reply: str) -> str:
        """Put the user's name into a reply now and then."""
        if self.name and self.draw.chance(0.25) and reply[-1] in ".!?":
            return f"{reply[:-1]}, {self.name}{reply[-1]}"
        return reply


Topic = Callable[[Talk], None]


def greet(talk: Talk) -> None:
    draw = talk.draw
    user, reply = draw.phrase(GREETINGS), draw.any(HOW_ARE_YOU["greeted"])
    if draw.chance(0.4):
        talk.name = draw.person()[0]
        form = draw.phrase(
            ["I'm {n}.", "My name is {n}.", "I am {n}.", "{n} here.", "Call me {n}.", "It's {n}."]
        )
        user = f"{user} {form.format(n=talk.name)}"
        reply = draw.any(
            [
                f"Hello {talk.name}, nice to meet you!",
                f"Hi {talk.name}! How can I help you?",
                f"Nice to meet you, {talk.name}. What would you like to talk about?",
                f"Good to meet you, {talk.name}! How are you today?",
            ]
        )
        talk.told["name"] = (NAME_QUESTIONS, f"Your name is {talk.name}.", talk.name)
    talk.say(user, reply)


NAME_QUESTIONS = [
    *("What is my name?", "Do you remember my name?", "Who am I?", "What's my name again?"),
    *("Can you tell me my name?", "What did I say my name was?", "Do you still know my name?"),
]


def how_are_you(talk: Talk) -> None:
    draw = talk.draw
    talk.say(draw.phrase(HOW_ARE_YOU["asked"]), draw.any(HOW_ARE_YOU["reply"]))


def feeling(talk: Talk) -> None:
    draw = talk.draw
    words, openings, causes, replies = draw.any(FEELINGS)
    word, cause = draw.pick(words), draw.pick(causes)
    user = draw.any(
        [
            f"I am {word} today.",
            f"I feel {word} because {cause}.",
            f"I'm so {word}. {cause[0].upper()}{cause[1:]}.",
            f"Today I am {word}, {cause}.",
            f"I'm feeling {word}.",
            f"{cause[0].upper()}{cause[1:]}, and now I'm {word}.",
            f"I am a bit {word}.",
        ]
    )
    talk.say(user, talk.address(f"{draw.any(openings)} {draw.any(replies)}"))
    talk.told["feeling"] = (
        ["How did I say I feel?", "How do I feel?", "What did I say about how I feel?"],
        f"You said you are {word}.",
        word,
    )


def likes(options: Sequence[str], key: str, forms: Sequence[str], replies: Sequence[str]) -> Topic:
    """Make a topic in which the user tells a favourite."""

    def topic(talk: Talk) -> None:
        value = talk.draw.pick(options)
        user = talk.draw.phrase(forms).format(v=value)
        talk.say(user, talk.address(talk.draw.any(replies).format(v=value, V=value.capitalize())))
        asked = [
            *(f"What is my favourite {key}?", f"Which {key} did I say I like?"),
            *(f"Do you remember my favourite {key}?", f"What {key} do I like?"),
            f"Can you tell me which {key} I like best?",
        ]
        talk.told[key] = (asked, f"You like {value}.", value)

    return topic


FAVOURITE = [
    *("I love {v}.", "My favourite is {v}.", "I really like {v}.", "I like {v} best."),
    *("I'm a big fan of {v}.", "I think {v} is the best.", "Nothing beats {v}.", "I enjoy {v}."),
]
food = likes(
    FOODS,
    "food",
    [
        *(
            "I love {v}.",
            "My favourite food is {v}.",
            "I really like {v}.",
            "I could eat {v} all day.",
        ),
        *("For dinner I want {v}.", "I like {v} most.", "I had {v} for lunch. It was so good."),
        *("I enjoy eating {v}.", "The best food is {v}.", "I am cooking {v} tonight."),
    ],
    [
        *("{V}! That sounds delicious. Do you cook it yourself?", "That is a tasty choice."),
        *("Good choice! How do you like to eat {v}?", "Yum! Many people like {v}."),
        *("{V} is a good meal. Who do you share it with?", "Enjoy your meal!"),
    ],
)
drink = likes(
    DRINKS,
    "drink",
    [
        "I drink {v} every morning.",
        "I love {v}.",
        "My favourite drink is {v}.",
        "I like {v} best.",
        "I always have {v} with breakfast.",
        "Nothing beats a cup of {v}.",
    ],
    [
        "{V} is a nice way to start the day.",
        "Good choice! I hope it was a good cup.",
        "Enjoy it!",
        "That sounds nice. Do you have it hot or cold?",
    ],
)
colour = likes(
    COLOURS,
    "colour",
    [
        "My favourite colour is {v}.",
        "I like {v} best.",
        "I love {v}.",
        "I painted my room {v}.",
        "I always wear {v}.",
        "The most beautiful colour is {v}.",
    ],
    [
        "{V} is a beautiful colour.",
        "Nice! {V} suits many things.",
        "What do you have in {v}?",
        "That is a lovely colour.",
    ],
)
hobby = likes(
    HOBBIES,
    "hobby",
    [
        "My hobby is {v}.",
        "I love {v}.",
        "In my free time I enjoy {v}.",
        "I like {v} a lot.",
        "I spend my weekends {v}.",
        "I have started {v}.",
        "I am really into {v}.",
    ],
    [
        "{V} is a great hobby! How long have you done it?",
        "That sounds like fun.",
        "Nice! What do you like most about {v}?",
        "{V} can be very relaxing. Do you do it alone?",
    ],
)


def pet(talk: Talk) -> None:
    draw = talk.draw
    animal, name = draw.pick(ANIMALS), draw.pick(PET_NAMES)
    user = draw.any(
        [
            f"I have a {animal} called {name}.",
            f"My {animal} is named {name}.",
            f"I got {article(animal)} last week. Its name is {name}.",
            f"{name} is my {animal}.",
            f"We have {article(animal)}, {name}.",
            f"Do you want to hear about my {animal} {name}?",
        ]
    )
    reply = draw.any(
        [
            f"{name} is a great name for {article(animal)}! What does {name} like to do?",
            f"How nice! I bet {name} is a lovely {animal}.",
            f"That is sweet. How old is {name}?",
            f"{article(animal).capitalize()} called {name}! Tell me more.",
        ]
    )
    talk.say(user, talk.address(reply))
    asked = [
        *(f"What is my {animal} called?", f"What's the name of my {animal}?"),
        *(f"Do you remember my {animal}'s name?", "What is the name of my pet?"),
        "What is my pet called?",
    ]
    talk.told["pet"] = (asked, f"Your {animal} is called {name}.", name)


def place(talk: Talk) -> None:
    draw = talk.draw
    city = draw.pick(CITIES)
    forms = ["I live in {v}.", "I am from {v}.", "I just moved to {v}.", "I come from {v}."]
    forms += ["I have lived in {v} for years.", "My home is in {v}."]
    replies = [
        *(f"What do you like about {city}?", f"{city} sounds like a nice place to live."),
        *(f"I have never been anywhere, but I would like to hear about {city}.",),
        f"How is life in {city}?",
    ]
    talk.say(draw.phrase(forms).format(v=city), talk.address(draw.any(replies)))
    asked = ["Where do I live?", "Which city am I from?", "Do you remember where I live?"]
    asked += ["What city did I tell you about?", "Where did I say I live?"]
    talk.told["city"] = (asked, f"You live in {city}.", city)


def job(talk: Talk) -> None:
    draw = talk.draw
    value = draw.pick(JOBS)
    name = article(value)
    forms = ["I am {v}.", "I work as {v}.", "I want to become {v}.", "I just started as {v}."]
    forms += ["I have been {v} for ten years.", "My job? I'm {v}."]
    replies = [
        *(f"{name.capitalize()}! That must be interesting work.", "What do you like about it?"),
        *(f"Being {name} is important work.", f"That is great. What does {name} do all day?"),
    ]
    talk.say(draw.phrase(forms).format(v=name), talk.address(draw.any(replies)))
    asked = ["What is my job?", "What do I do for a living?", "Do you remember what I work as?"]
    asked += ["What did I say about my job?", "Which job did I mention?"]
    talk.told["job"] = (asked, f"You said you are {name}.", value)


def plan(talk: Talk) -> None:
    draw = talk.draw
    day, hobby_ = draw.any(DAYS), draw.pick(HOBBIES)
    person = draw.person()[0]
    user = draw.any(
        [
            f"On {day} I am going to meet {person}.",
            f"I will visit {person} on {day}.",
            f"{person} and I want to try {hobby_} on {day}.",
            f"My friend {person} comes on {day}.",
            f"I have a date with {person} on {day}.",
            f"{day} is the day I see {person} again.",
        ]
    )
    replies = [
        *(f"That sounds like fun. Say hello to {person}!", f"I hope you have a great {day}!"),
        *(f"Nice! What will you and {person} do?", f"{day} will be a good day then."),
    ]
    talk.say(user, talk.address(draw.any(replies)))
    talk.told["friend"] = (
        ["Who will I meet?", f"Who do I see on {day}?", "What is my friend's name?"],
        f"You will see {person} on {day}.",
        person,
    )


def lost(talk: Talk) -> None:
    draw = talk.draw
    thing = draw.pick(OBJECTS)
    forms = ["I can't find my {v}.", "I lost my {v}.", "Where is my {v}?", "My {v} is gone."]
    forms += ["I have been looking for my {v} all day.", "Somebody took my {v}!"]
    replies = [
        *(f"I'm sorry to hear that. Where did you last see your {thing}?",),
        *(f"Try to remember where you last used the {thing}.", "Have you looked under the bed?"),
        f"I hope you find your {thing} soon.",
    ]
    talk.say(draw.phrase(forms).format(v=thing), talk.address(draw.any(replies)))
    asked = ["What did I lose?", "What am I looking for?", "What was it that I can't find?"]
    talk.told["lost"] = (asked, f"You are looking for your {thing}.", thing)


def fixed(pairs: Sequence[tuple[Sequence[str], Sequence[str]]]) -> Topic:
    """Make a topic of ready-made questions and replies."""

    def topic(talk: Talk) -> None:
        asked, replies = talk.draw.any(pairs)
        talk.say(talk.draw.phrase(asked), talk.address(talk.draw.any(replies)))

    return topic


def define(talk: Talk) -> None:
    noun, meaning = talk.draw.any(DEFINITIONS)
    forms = ["What is {v}?", "What's {v}?", "Can you explain what {v} is?", "Tell me what {v} is."]
    forms += ["Do you know what {v} is?", "Explain {v} to a child."]
    name = article(noun)
    talk.say(talk.draw.phrase(forms).format(v=name), f"{name[0].upper()}{name[1:]} is {meaning}.")


def opposite(talk: Talk) -> None:
    pair = list(talk.draw.any(OPPOSITES))
    talk.draw.rng.shuffle(pair)
    a, b = pair
    forms = ['What is the opposite of "{v}"?', "Opposite of {v}?", "What's the opposite of {v}?"]
    forms += ["Name the opposite of {v}.", "Which word is the opposite of {v}?"]
    reply = talk.draw.any([f"The opposite of {a} is {b}.", f"{b.capitalize()}."])
    talk.say(talk.draw.phrase(forms).format(v=a), reply)


def sound(talk: Talk) -> None:
    animal, noise = talk.draw.any(SOUNDS)
    forms = ["What does a {v} say?", "Which sound does a {v} make?", "How does a {v} go?"]
    forms += ["What noise does a {v} make?", "Tell me the sound of a {v}."]
    reply = f'A {animal} says "{noise}".'
    talk.say(talk.draw.phrase(forms).format(v=animal), reply)


def arithmetic(talk: Talk) -> None:
    rng = talk.draw.rng
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    sign, result = talk.draw.any((("+", a + b), ("-", max(a, b) - min(a, b))))
    a, b = (a, b) if sign == "+" else (max(a, b), min(a, b))
    word = {"+": "plus", "-": "minus"}[sign]
    forms = ["What is {a} {w} {b}?", "How much is {a} {s} {b}?", "{a} {s} {b}?", "{a} {w} {b}"]
    forms += ["Can you tell me what {a} {w} {b} is?", "Calculate {a} {s} {b}."]
    user = talk.draw.phrase(forms).format(a=a, b=b, s=sign, w=word)
    talk.say(user, f"{a} {word} {b} is {result}.")


def weekday(talk: Talk) -> None:
    at = talk.draw.rng.randrange(7)
    after = talk.draw.chance(0.5)
    other = DAYS[(at + (1 if after else -1)) % 7]
    word = "after" if after else "before"
    forms = ["Which day comes {w} {v}?", "What day is {w} {v}?", "Name the day {w} {v}."]
    forms += ["What is the day {w} {v}?", "Today is {v}. What day comes {w} it?"]
    talk.say(
        talk.draw.phrase(forms).format(w=word, v=DAYS[at]), f"{other} comes {word} {DAYS[at]}."
    )


TOPICS: Sequence[tuple[Topic, float]] = (
    *((how_are_you, 2), (feeling, 3), (food, 2), (drink, 1), (colour, 1), (hobby, 2), (pet, 2)),
    *((place, 2), (job, 2), (plan, 2), (lost, 1), (define, 2), (opposite, 1), (sound, 0.5)),
    *((arithmetic, 1), (weekday, 0.5), (fixed(ABOUT_ME), 3), (fixed(ADVICE), 3)),
    *((fixed(ANSWERS), 2), (fixed(CHOICES), 2), (fixed(WEATHER), 2), (fixed(JOKES), 1)),
    (fixed(THANKS), 1),
)


def recall(talk: Talk) -> None:
    """Ask for something told before."""
    if talk.told:
        key = talk.draw.any(sorted(talk.told))
        asked, reply, value = talk.told[key]
        talk.recalls[len(talk.lines)] = value
        talk.say(talk.draw.any(asked), reply)


def converse(draw: Draw) -> Talk:
    """Draw a conversation."""
    talk = Talk(draw)
    if draw.chance(0.5):
        greet(talk)
    topics, weights = zip(*TOPICS, strict=True)
    for topic in draw.rng.choices(topics, weights, k=draw.any((1, 1, 2, 2, 3, 4))):
        topic(talk)
    if draw.chance(0.6):
        recall(talk)
    if draw.chance(0.2):
        talk.say(draw.phrase(FAREWELLS[0]), talk.address(draw.any(FAREWELLS[1])))
    return talk


def chats(draw: Draw, count: int) -> Iterator[Chat]:
    """Write conversations up to one of their replies, more often the last or one that recalls."""
    for _ in range(count):
        talk = converse(draw)
        ends = [*range(len(talk.lines)), len(talk.lines) - 1, *talk.recalls, *talk.recalls]
        yield chat(talk, draw.any(ends))


def chat(talk: Talk, end: int) -> Chat:
    """Write a conversation up to the reply of an exchange."""
    messages = [
        {"role": role, "content": text}
        for pair in talk.lines[: end + 1]
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    record: Chat = {"messages": messages}
    return {**record, "answer": talk.recalls[end]} if end in talk.recalls else record
