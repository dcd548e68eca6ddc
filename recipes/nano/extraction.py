"""Structured replies from a text: JSON by varied schemas, Markdown tables and lists, tool calls.

JSON has no spaces between tokens and its keys in the order that was asked for; numbers of the text
stay numbers where the key says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence

from recipes.nano.facts import Fact, Subject, draw_subjects, mixed_text
from recipes.nano.raw import Pair, compact_json
from recipes.nano.slots import (
    BOYS,
    CITIES,
    DAYS,
    DRINKS,
    FOODS,
    GIRLS,
    LAST_NAMES,
    OBJECTS,
    PLACES,
    Draw,
    article,
    listed,
)

Record = dict[str, object]
NUMBERS = {"age", "guests", "year", "number", "quantity", "people", "amount"}
EXTRACT = [
    "[Extract|Give|Get|Find|Return|Write|Output] {keys} as [JSON|a JSON object][.|, please.|]",
    "[Reply|Answer|Respond] with [JSON|a JSON object] with the [keys|fields] {keys}[.|]",
    "[Extract|Give me|Get] this [information|data] as JSON: {keys}[.|]",
    "[Write|Make|Create|Build] a JSON object with [{keys}|the keys {keys}|the fields {keys}][.|]",
    "[Turn|Convert|Change] this [text|] [into|to] JSON with {keys}. Reply with JSON only[.|]",
    "[Read the text and fill|Fill] in a JSON object with the [keys|fields] {keys}[.|]",
    "What are {keys}? [Answer in|Reply with|Give] JSON[.|]",
    "JSON with {keys}[, please.|.|:]",
    "[Extract|Find] the [fields|values|facts] {keys} [from|in] the text[.|, as JSON.| as JSON.]",
]
BY_SCHEMA = [
    "[Reply|Answer|Respond] [with|in] JSON that [fits|follows|matches] this schema: {schema}",
    "Extract the [data|information|facts]. [Schema|JSON schema|Use this schema]: {schema}",
    "[Fill in|Fill|Complete] this JSON schema from the text: {schema}",
    "[Answer|Reply] as JSON by this schema[.|:]\n{schema}",
    "Use this [schema|JSON schema] for your [JSON reply|reply|answer]: {schema}",
]
ALL = [
    "[Extract|Give me|Write] [the facts|the information|the data|everything] as JSON[.|]",
    "[Turn|Convert|Change|Make] [this|this text|the text] [into|to] [JSON|a JSON object][.|]",
    "[Write|Give|Show|Put] [this|the information of this text|the text] as JSON[.|, please.|]",
]
PLACE_TEXT = [
    *("{what}\n\n{text}", "{text}\n\n{what}", "{what} {text}", "{what}\nText: {text}"),
    *("{what}\n{text}", "{text}\n{what}", "Text: {text}\n\n{what}", '{what}\n\n"{text}"'),
]


def extraction_pairs(draw: Draw, sentences: Sequence[str], count: int) -> Iterator[Pair]:
    """Ask for some fields of a person, event, thing or message; sometimes for lists of names."""
    makers: list[Callable[[Draw], Pair]] = [
        *(from_facts, from_facts, from_facts, from_message, from_message, list_of_subjects),
    ]
    named = [text for text in sentences if is_named(text)]
    for number in range(count):
        if named and number % 8 == 7:
            yield names_in(draw, draw.any(named))
        else:
            yield draw.any(makers)(draw)


def typed(key: str, value: str) -> object:
    return int(value) if key in NUMBERS and value.isdigit() else value


def ask_for(draw: Draw, values: dict[str, object], text: str) -> Pair:
    """Ask for some of the values, in an order of our own."""
    keys = draw.rng.sample(list(values), draw.rng.randint(min(2, len(values)), len(values)))
    wanted = {key: values[key] for key in keys}
    form = draw.rng.random()
    if form < 0.15 and len(values) == len(keys):
        wanted, what = values, draw.phrase(ALL)
    elif form < 0.4:
        what = draw.phrase(BY_SCHEMA).format(schema=compact_json(schema(wanted)))
    else:
        quoted = draw.chance(0.4)
        names = [f'"{key}"' if quoted else key for key in keys]
        joined = listed(names) if draw.chance(0.7) else ", ".join(names)
        what = draw.phrase(EXTRACT).format(keys=joined)
    prompt = draw.any(PLACE_TEXT).format(what=what, text=text)
    return {"prompt": prompt, "reply": compact_json(wanted)}


def schema(values: dict[str, object]) -> dict[str, object]:
    """Write the JSON Schema of an object with these values."""
    types = {str: "string", int: "integer", bool: "boolean", list: "array"}
    properties = {key: {"type": types[type(value)]} for key, value in values.items()}
    return {"type": "object", "properties": properties, "required": list(values)}


def from_facts(draw: Draw) -> Pair:
    subject = draw_subjects(draw, 1, draw.rng.randint(2, 5))[0]
    values = {key: typed(key, value) for key, value in subject.values().items()}
    return ask_for(draw, values, subject.text(draw))


LISTED = [
    "[Make|Write|Give|Return] a JSON [list|array] with {keys} of each[.|]",
    "[Extract|Give me|Return] a JSON [list|array] of objects with {keys}[.|, please.|]",
    "List [all of them|them all|everyone] as JSON with {keys}[.|]",
    "[Give|Write|Return] a JSON array, one object each, with the [keys|fields] {keys}[.|]",
    "JSON [list|array] with {keys}[, please.|.|:]",
]


def list_of_subjects(draw: Draw) -> Pair:
    """Ask for a JSON list with one object per subject."""
    subjects = aligned_subjects(draw, draw.rng.randint(2, 3))
    rows = [{k: typed(k, v) for k, v in one.values().items()} for one in subjects]
    keys = listed(list(rows[0]))
    what = draw.phrase(LISTED).format(keys=keys)
    text = mixed_text(draw, subjects)
    prompt = draw.any(PLACE_TEXT).format(what=what, text=text)
    return {"prompt": prompt, "reply": compact_json(rows)}


def aligned_subjects(draw: Draw, count: int) -> list[Subject]:
    """Draw subjects that have facts of the same kinds, in the same order."""
    while True:
        first, *_ = subjects = draw_subjects(draw, count, 10)
        keys = draw.rng.sample([fact.key for fact in first.facts], draw.any((1, 2, 2, 3)))
        if all(set(keys) <= {fact.key for fact in one.facts} for one in subjects):
            break
    return [
        Subject(one.kind, one.name, one.pronoun, [by_key(one, key) for key in keys])
        for one in subjects
    ]


def by_key(subject: Subject, key: str) -> Fact:
    return next(fact for fact in subject.facts if fact.key == key)


NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()


def from_message(draw: Draw) -> Pair:
    """Ask for the fields of an order, an appointment, a contact, a bill or a booking."""
    text, values = draw.any((order, appointment, contact, bill, booking))(draw)
    return ask_for(draw, values, text)


Message = tuple[str, dict[str, object]]


def full_name(draw: Draw) -> str:
    return f"{draw.person()[0]} {draw.pick(LAST_NAMES)}"


def order(draw: Draw) -> Message:
    name, item = full_name(draw), draw.pick([*FOODS, *DRINKS, *(f"{o}s" for o in OBJECTS)])
    count, city = draw.rng.randint(2, 30), draw.pick(CITIES)
    text = draw.any(
        [
            f"Hello, this is {name}. I want to order {count} {item}. Please send them to {city}.",
            f"Please send {count} {item} to {city}. Thank you, {name}",
            f"{name} from {city} ordered {count} {item}.",
            f"New order: {count} x {item}, customer {name}, delivery to {city}.",
            f"I need {count} {item} in {city} by Friday. {name}",
        ]
    )
    return text, {"name": name, "item": item, "quantity": count, "city": city}


def appointment(draw: Draw) -> Message:
    name, day, time, place = draw.person()[0], draw.any(DAYS), draw.time(), draw.pick(PLACES)
    text = draw.any(
        [
            f"Let's meet on {day} at {time} at {place}. {name}",
            f"Hi, {name} here. Can we meet at {place} on {day}, {time}?",
            f"Meeting with {name}: {day}, {time}, {place}.",
            f"Don't forget: {name} is waiting for you at {place} at {time} on {day}.",
            f"On {day} {name} will be at {place} from {time} on.",
        ]
    )
    return text, {"name": name, "day": day, "time": time, "place": place}


def contact(draw: Draw) -> Message:
    first, last = draw.person()[0], draw.pick(LAST_NAMES)
    mail = f"{first.lower()}{draw.any(('.', '_', ''))}{last.lower()}@{draw.any(MAIL)}"
    phone = (
        "-".join(str(draw.rng.randint(100, 999)) for _ in range(2))
        + f"-{draw.rng.randint(1000, 9999)}"
    )
    city, name = draw.pick(CITIES), f"{first} {last}"
    text = draw.any(
        [
            f"You can reach {name} at {mail} or by phone at {phone}. The office is in {city}.",
            f"{name}, {city}, phone {phone}, e-mail {mail}",
            f"My name is {name} and I live in {city}. Call me at {phone} or write to {mail}.",
            f"Contact: {name} ({mail}), tel. {phone}, based in {city}.",
            f"Write to {mail}, that is {name} from {city}. Or call {phone}.",
        ]
    )
    return text, {"name": name, "email": mail, "phone": phone, "city": city}


MAIL = ("example.com", "mail.com", "post.org", "web.net", "inbox.io")


def bill(draw: Draw) -> Message:
    name, item, price, date = full_name(draw), draw.pick(OBJECTS), draw.price(), draw.date()
    amount, currency = price.split()
    text = draw.any(
        [
            f"{name} paid {price} for {article(item)} on {date}.",
            f"Invoice of {date}: one {item}, {price}. Customer: {name}.",
            f"On {date}, {name} bought {article(item)} that cost {price}.",
            f"Receipt. {item.capitalize()}, {price}. Sold to {name}, {date}.",
            f"Dear {name}, please pay {price} for the {item} by {date}.",
        ]
    )
    keys: dict[str, object] = {"customer": name, "item": item, "date": date}
    return text, {**keys, "amount": int(amount), "currency": currency}


def booking(draw: Draw) -> Message:
    name, people, date, time = full_name(draw), draw.rng.randint(2, 12), draw.date(), draw.time()
    said = NUMBER_WORDS[people] if draw.chance(0.3) else str(people)
    smoking = draw.chance(0.5)
    where = "outside" if smoking else "inside"
    text = draw.any(
        [
            f"A table for {said} on {date} at {time}, please. We want to sit {where}. {name}",
            f"{name} booked a table for {said} people, {date}, {time}, {where}.",
            f"Hello, I'd like a table {where} for {said} at {time} on {date}. My name is {name}.",
            f"Reservation: {name}, {said} persons, {where}, {date}, {time}.",
            f"We are {said} and come on {date} at {time}. We sit {where}. Regards, {name}",
        ]
    )
    values: dict[str, object] = {"name": name, "people": people, "date": date, "time": time}
    return text, {**values, "outside": smoking}


NAME = re.compile(rf"\b({'|'.join(sorted({*GIRLS, *BOYS, 'Tom', 'Mary', 'Sami', 'Yanni'}))})\b")


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(NAME.findall(text)))


def is_named(text: str) -> bool:
    """True for a sentence of usual length with a name."""
    return 20 < len(text) < 110 and bool(_names(text))


NAMES = [
    "[List|Extract|Give|Find|Return] [the|all] names [in this sentence |]as [JSON|a JSON list][.|]",
    "Which [people|persons] are named? [Reply|Answer] with a JSON [list|array][.|]",
    "[Find|List] the names. Answer with a JSON list of strings[.|]",
    "[Who is|Which names are] in this sentence? [JSON list|JSON array][, please.|.]",
]


def names_in(draw: Draw, text: str) -> Pair:
    """Ask for the names in a sentence that somebody wrote, as a JSON list."""
    renamed = text
    for old, (new, _) in zip(_names(text), draw.people(len(_names(text))), strict=True):
        renamed = re.sub(rf"\b{old}\b", f"\0{new}", renamed)
    renamed = renamed.replace("\0", "")
    prompt = draw.any(PLACE_TEXT).format(what=draw.phrase(NAMES), text=renamed)
    return {"prompt": prompt, "reply": compact_json(_names(renamed))}


# --- Markdown


def markdown_pairs(draw: Draw, count: int) -> Iterator[Pair]:
    """Ask for facts as a table or a list."""
    for _ in range(count):
        yield draw.any((table, table, bullets, numbered, checklist))(draw)


TABLE = [
    "[Make|Write|Create|Give me|Build] a [Markdown|] table with {columns}[.|]",
    "[Write|Show|Put|Format] this as a [Markdown|] table with [the columns|columns] {columns}[.|]",
    "[Put|Turn|Convert] [this|the text] into a [Markdown|] table: {columns}[.|]",
    "[Table|Markdown table] with {columns}[, please.|.|:]",
    "Turn [the text|this] into a table. Columns: {columns}[.|]",
]
BULLETS = [
    "[Make|Write|Give me|Create] a [bullet|bulleted|] list[.| of these.|, please.]",
    "[Write|Show|Format] [this|these] as a [Markdown|bullet|bulleted] list[.|]",
    "[List these|List them] with [bullets|dashes][.|, please.]",
    "One item per line with a dash[.|]",
    "[Bullet points|Bullets|As a list with dashes][, please.|.|:]",
]
NUMBERED = [
    "[Make|Write|Give me|Create] a numbered list[.| of these.|, please.]",
    "Number [these|them|the items][.|, please.|]",
    "[Write|Show|Format] [this|these] as a numbered list[.|]",
    "[List these|List them] with numbers[.|, please.]",
    "[Numbered, one per line|Numbered list][.|, please.|:]",
]
CHECKLIST = [
    "[Make|Write|Give me|Create] a [checklist|to-do list|todo list][.| of these.|, please.]",
    "[Write|Turn|Put] [this|these] [as|into] a [checklist|to-do list][.|]",
    "[To-do list|Checklist] with boxes[, please.|.|:]",
    "[Markdown checklist of these|A Markdown to-do list][.|, please.]",
]


def table(draw: Draw) -> Pair:
    subjects = aligned_subjects(draw, draw.rng.randint(2, 4))
    rows = [one.values() for one in subjects]
    keys = list(rows[0])
    lines = [keys, ["---"] * len(keys), *(list(row.values()) for row in rows)]
    written = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    columns = listed(keys)
    what = draw.phrase(TABLE).format(columns=columns)
    return {
        "prompt": draw.any(PLACE_TEXT).format(what=what, text=mixed_text(draw, subjects)),
        "reply": written,
    }


def items(draw: Draw) -> list[str]:
    return draw.picks(
        draw.any((FOODS, OBJECTS, DRINKS, CITIES)), draw.any((2, 3)) + draw.any((0, 1))
    )


def _list_pair(draw: Draw, forms: Sequence[str], write: Callable[[list[str]], str]) -> Pair:
    chosen = items(draw)
    prompt = draw.any(PLACE_TEXT).format(what=draw.phrase(forms), text=listed(chosen))
    return {"prompt": prompt, "reply": write(chosen)}


def bullets(draw: Draw) -> Pair:
    return _list_pair(draw, BULLETS, lambda words: "\n".join(f"- {word}" for word in words))


def numbered(draw: Draw) -> Pair:
    return _list_pair(
        draw, NUMBERED, lambda words: "\n".join(f"{i}. {word}" for i, word in enumerate(words, 1))
    )


def checklist(draw: Draw) -> Pair:
    return _list_pair(draw, CHECKLIST, lambda words: "\n".join(f"- [ ] {word}" for word in words))


# --- tool calls


def tool(name: str, description: str, **properties: str) -> Record:
    schema_ = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": schema_, "required": list(properties)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


Use = tuple[Record, str, dict[str, object]]  # the tool, what the user says, the arguments


def weather(draw: Draw) -> Use:
    city = draw.pick(CITIES)
    forms = ["What is the weather in {c}?", "Will it rain in {c}?", "How warm is it in {c}?"]
    forms += [
        "Weather in {c}, please.",
        "I am going to {c}. Do I need a coat?",
        "Is it sunny in {c}?",
    ]
    name = draw.any(("get_weather", "weather", "current_weather"))
    return (
        tool(name, "Get the weather of a city", city="string"),
        _fill(draw, forms, c=city),
        {"city": city},
    )


def _fill(draw: Draw, forms: Sequence[str], **values: object) -> str:
    said = [f"[{one}|{one}|{one}|Hi. {one}|{one} Thanks.|Hello, nano. {one}]" for one in forms]
    return draw.phrase(said).format(**values)


def alarm(draw: Draw) -> Use:
    time, day = draw.time(), draw.any(DAYS)
    forms = ["Wake me at {t} on {d}.", "Set an alarm for {t} on {d}.", "Alarm on {d} at {t}."]
    forms += ["On {d} I have to get up at {t}.", "Please set an alarm: {d}, {t}."]
    name = draw.any(("set_alarm", "create_alarm", "alarm"))
    made = tool(name, "Set an alarm", time="string", day="string")
    return made, _fill(draw, forms, t=time, d=day), {"time": time, "day": day}


def message(draw: Draw) -> Use:
    name, event = draw.person()[0], draw.pick(PLACES)
    text = draw.any([f"I am at {event}", f"Meet me at {event}", f"I will come to {event}"])
    forms = ['Tell {n}: "{x}"', 'Send {n} the message "{x}".', 'Write to {n}: "{x}"']
    forms += ['Text {n} "{x}", please.', 'Message for {n}: "{x}"']
    called = draw.any(("send_message", "send_text", "message"))
    made = tool(called, "Send a message to a person", recipient="string", text="string")
    return made, _fill(draw, forms, n=name, x=text), {"recipient": name, "text": text}


def reminder(draw: Draw) -> Use:
    thing, day = draw.pick(OBJECTS), draw.any(DAYS)
    task = draw.any([f"buy a {thing}", f"bring the {thing}", f"clean the {thing}"])
    forms = ["Remind me on {d} to {x}.", "I want to {x} on {d}. Remind me.", "Reminder: {x}, {d}."]
    forms += ["Don't let me forget to {x} on {d}.", "On {d} I must {x}."]
    name = draw.any(("add_reminder", "remind", "create_reminder"))
    made = tool(name, "Add a reminder", task="string", day="string")
    return made, _fill(draw, forms, x=task, d=day), {"task": task, "day": day}


def convert(draw: Draw) -> Use:
    amount = draw.rng.randint(2, 500)
    source, target = draw.rng.sample(["EUR", "USD", "GBP", "JPY", "CHF", "SEK"], 2)
    forms = ["How much is {a} {s} in {t}?", "Convert {a} {s} to {t}.", "{a} {s} in {t}, please."]
    forms += ["I have {a} {s}. What is that in {t}?", "Change {a} {s} into {t}."]
    name = draw.any(("convert_currency", "exchange", "convert"))
    made = tool(name, "Convert money", amount="number", source="string", target="string")
    said = _fill(draw, forms, a=amount, s=source, t=target)
    return made, said, {"amount": amount, "source": source, "target": target}


def search(draw: Draw) -> Use:
    topic = draw.pick([*FOODS, *OBJECTS])
    forms = [
        "Search for {x}.",
        "Find something about {x}.",
        "Look up {x}.",
        "What can you find on {x}?",
    ]
    forms += ["I want to know more about {x}.", "Google {x}."]
    name = draw.any(("search", "web_search", "search_web"))
    return (
        tool(name, "Search the web", query="string"),
        _fill(draw, forms, x=topic),
        {"query": topic},
    )


def book(draw: Draw) -> Use:
    place, people, time = draw.pick(CITIES), draw.rng.randint(1, 9), draw.time()
    forms = ["Book a table for {p} in {c} at {t}.", "Table for {p}, {t}, in {c}."]
    forms += ["We are {p} and want to eat in {c} at {t}.", "Reserve a table in {c} at {t} for {p}."]
    forms += ["I need a table in {c} for {p} people at {t}."]
    name = draw.any(("book_table", "reserve_table", "reserve"))
    made = tool(name, "Book a table", city="string", people="integer", time="string")
    said = _fill(draw, forms, p=people, c=place, t=time)
    return made, said, {"city": place, "people": people, "time": time}


def play(draw: Draw) -> Use:
    name = full_name(draw)
    forms = [
        "Play something by {n}.",
        "I want to hear {n}.",
        "Put on {n}.",
        "Music by {n}, please.",
    ]
    forms += ["Play {n}."]
    called = draw.any(("play_music", "play", "play_artist"))
    return tool(called, "Play music", artist="string"), _fill(draw, forms, n=name), {"artist": name}


USES: Sequence[Callable[[Draw], Use]] = (
    *(weather, alarm, message, reminder, convert, search, book, play),
)


def tool_chats(draw: Draw, count: int) -> Iterator[Record]:
    """Offer one to three tools and ask for one; the reply is a call of it."""
    for _ in range(count):
        uses = [make(draw) for make in draw.rng.sample(list(USES), draw.rng.randint(1, 3))]
        chosen, said, arguments = uses[0]
        tools = [one for one, _, _ in uses]
        draw.rng.shuffle(tools)
        function = chosen["function"]
        assert isinstance(function, dict)
        call = {"name": function["name"], "arguments": json.dumps(arguments)}
        reply = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": call}],
        }
        yield {"messages": [{"role": "user", "content": said}, reply], "tools": tools}
