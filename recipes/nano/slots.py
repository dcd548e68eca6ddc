"""Words that templates are filled with, and draws that keep a part of them out of training.

Every fifth entry of a list with five or more is held out: training never sees that name or that
dish; held-out examples use nothing else. Wordings are expanded from alternatives in brackets, and a
fifth of the results is held out: the words are known, the sentence is new. `Draw.any` draws without
such a rule, for what need not be new, such as the wording of a reply.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")
HELD_OUT_EVERY = 5
ALTERNATIVES = re.compile(r"\[([^\[\]]*\|[^\[\]]*)\]")  # [a|b], innermost first
CASUAL = 0.2  # of wordings: no capital, no period
MAX_DRAWS = 200  # of a wording of the right side

GIRLS = (
    "Anna Clara Emma Grace Iris Kate Lily Mia Nora Rosa Sara Tina Zoe Mary Lucy Alice Ella Ivy "
    "Jane Maya Nina Olga Paula Ruth Sofia Vera Wendy Amy Beth Carla Dora Eva Fiona Gina Hannah "
    "Ines Julia Kira Laura Megan Naomi Olive Petra Rachel Stella Tara Una Violet Yara Leila Marta "
    "Bella Carmen Diana Elena Freya Greta Helen Ida Joan Karen Linda Monica Nadia Polly Ramona "
    "Susan"
).split()
BOYS = (
    "Ben David Finn Henry Jack Leo Max Oscar Paul Sam Tom Victor John Peter Adam Hugo Luke Alan "
    "Bruno Carl Daniel Eric Felix George Harry Ivan James Kevin Liam Mark Noah Owen Philip Robert "
    "Simon Theo Uri Walter Andrew Brian Colin Dennis Edgar Frank Gary Howard Isaac Joel Karl "
    "Louis Martin Nick Omar Pablo Ralph Steve Tim Vince Will Arthur Boris Conrad Emil Fred Gus "
    "Ian Jonas"
).split()
LAST_NAMES = (
    "Smith Brown Miller Wilson Moore Taylor Clark Lewis Walker Hall Young King Wright Hill Green "
    "Baker Adams Nelson Carter Mitchell Turner Parker Evans Collins Stewart Morris Rogers Reed "
    "Cook Morgan Bell Murphy Bailey Cooper Ward Cox Gray Watson Brooks Kelly Price Bennett Wood "
    "Ross Fisher Hunt Stone Novak Silva Rossi Weber Larsen Dubois Tanaka Khan Cohen Lopez Ivanov "
    "Berg"
).split()
CITIES = (
    "London Paris Rome Berlin Madrid Vienna Oslo Lisbon Dublin Athens Prague Warsaw Boston "
    "Chicago Denver Seattle Toronto Tokyo Kyoto Delhi Cairo Nairobi Sydney Lima Quito Havana "
    "Dallas Houston Munich Hamburg Zurich Geneva Milan Naples Venice Porto Seville Lyon Nice "
    "Bergen Helsinki Riga Kiev Moscow Istanbul Ankara Beirut Dubai Mumbai Bangkok Hanoi Seoul "
    "Osaka Manila Perth Auckland Montreal Ottawa Miami Austin Phoenix Portland Glasgow York Leeds "
    "Bristol Cardiff Cork"
).split()
COUNTRIES = (
    "Spain Italy France Germany Norway Sweden Japan India China Brazil Peru Chile Canada Mexico "
    "Egypt Kenya Morocco Greece Turkey Poland Ireland Scotland Portugal Austria Finland Iceland "
    "Vietnam Thailand Korea Australia"
).split()
FOODS = [
    *("pizza", "pasta", "rice", "soup", "bread", "cheese", "fish", "chicken", "pancakes", "salad"),
    *("apples", "sushi", "tacos", "noodles", "curry", "beans", "eggs", "potatoes", "tomato soup"),
    *("chocolate", "ice cream", "apple pie", "cherries", "strawberries", "bananas", "oranges"),
    *(
        "mushrooms",
        "dumplings",
        "burgers",
        "fries",
        "sandwiches",
        "waffles",
        "lentils",
        "omelettes",
    ),
    *("blueberry cake", "carrot cake", "honey", "yoghurt", "popcorn", "peaches", "grapes", "stew"),
    *("onion soup", "lasagna", "meatballs", "porridge", "risotto", "pears", "spinach", "salmon"),
]
DRINKS = [
    *("tea", "coffee", "milk", "water", "orange juice", "apple juice", "hot chocolate", "lemonade"),
    *("green tea", "mint tea", "cocoa", "tomato juice", "grape juice", "black coffee", "soda"),
]
COLOURS = [
    *("red", "blue", "green", "yellow", "black", "white", "brown", "pink", "purple", "orange"),
    *("grey", "silver", "golden", "dark green", "light blue"),
]
ANIMALS = [
    *("cat", "dog", "rabbit", "hamster", "parrot", "goldfish", "turtle", "pony", "mouse", "duck"),
    *("goat", "canary", "snail", "lizard", "guinea pig", "hen", "donkey", "kitten", "puppy"),
    *("frog", "ferret", "budgie", "lamb", "pigeon", "horse"),
]
PET_NAMES = (
    "Rex Bella Luna Max Coco Milo Fluffy Spot Rusty Ginger Biscuit Pepper Toffee Daisy Socks "
    "Bruno Misty Shadow Snowy Tiger Whiskers Buddy Cookie Peanut Pumpkin Sunny Teddy Lucky Oreo "
    "Patch Smokey Bubbles Caramel Domino Maple Noodle Olive Poppy Waffle Ziggy"
).split()
JOBS = [
    *("teacher", "doctor", "nurse", "baker", "farmer", "driver", "cook", "painter", "pilot"),
    *("gardener", "singer", "writer", "dentist", "librarian", "carpenter", "engineer", "waiter"),
    *("lawyer", "plumber", "tailor", "fisherman", "firefighter", "photographer", "mechanic"),
    *("programmer", "shopkeeper", "judge", "vet", "barber", "florist", "guard", "journalist"),
    *("musician", "scientist", "sailor", "builder", "clerk", "butcher", "translator", "actor"),
]
HOBBIES = [
    *("reading", "swimming", "painting", "cooking", "singing", "dancing", "running", "fishing"),
    *("gardening", "hiking", "drawing", "cycling", "chess", "knitting", "photography", "skating"),
    *("playing the guitar", "playing the piano", "playing football", "playing tennis", "baking"),
    *("collecting stamps", "watching birds", "writing poems", "playing cards", "sailing"),
    *("climbing", "skiing", "yoga", "building models", "playing the violin", "playing drums"),
    *("surfing", "camping", "sewing", "juggling", "playing basketball", "learning languages"),
]
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
OBJECTS = [
    *("book", "lamp", "chair", "table", "bicycle", "umbrella", "hat", "coat", "phone", "camera"),
    *("clock", "mirror", "kettle", "bag", "pen", "notebook", "ball", "guitar", "watch", "scarf"),
    *("tent", "blanket", "pillow", "bottle", "cup", "basket", "ladder", "hammer", "candle", "map"),
    *("radio", "key", "ring", "jacket", "vase", "desk", "shirt", "sweater", "backpack", "kite"),
    *("drum", "puzzle", "mug", "rug", "spoon", "toaster", "suitcase", "helmet", "flute", "shelf"),
]
PLACES = [
    *("the park", "the library", "the museum", "the station", "the market", "the school"),
    *("the beach", "the kitchen", "the garden", "the town hall", "the old church", "the harbour"),
    *("the zoo", "the cinema", "the hospital", "the lake", "the bakery", "the bus stop"),
    *("the swimming pool", "the bridge", "the theatre", "the airport", "the playground"),
    *("the bookshop", "the castle", "the forest", "the farm", "the hotel", "the post office"),
    *("the sports hall", "the river", "the stadium", "the cafe", "the bank", "the office"),
]
EVENTS = [
    *("concert", "book fair", "football match", "school play", "picnic", "flea market", "art show"),
    *("chess tournament", "cooking class", "dance night", "film evening", "garden party"),
    *("birthday party", "science fair", "summer festival", "bake sale", "yoga class", "quiz night"),
    *("charity run", "poetry reading", "swimming race", "music lesson", "farmers' market"),
    *("board meeting", "job interview", "wedding", "puppet show", "boat trip", "guided tour"),
]


class Draw:
    """Draws from one side of every list; deterministic for a seed."""

    def __init__(self, rng: Random, *, held_out: bool = False) -> None:
        self.rng, self.held_out = rng, held_out

    def pick(self, options: Sequence[T]) -> T:
        """Draw from the part of a list that belongs to this side."""
        return self.rng.choice(self.side(options))

    def side(self, options: Sequence[T]) -> Sequence[T]:
        """Return the entries of a list that this side may use."""
        if len(options) < HELD_OUT_EVERY:
            return options
        is_last = HELD_OUT_EVERY - 1
        return [
            o for i, o in enumerate(options) if (i % HELD_OUT_EVERY == is_last) is self.held_out
        ]

    def phrase(self, options: Sequence[str]) -> str:
        """Draw a wording of this side; raises ValueError if an option has no such wording."""
        for _ in range(MAX_DRAWS):
            text = self._casual(self.expand(self.rng.choice(options)))
            if is_held_out(text) is self.held_out:
                return text
        raise ValueError(f"no wording of {options[0]!r} is on the side held_out={self.held_out}")

    def expand(self, text: str) -> str:
        """Choose one of each `[a|b]`, the inner ones first."""
        while ALTERNATIVES.search(text):
            text = ALTERNATIVES.sub(lambda match: self.rng.choice(match[1].split("|")), text, 1)
        return text

    def _casual(self, text: str) -> str:
        """Drop the capital and the final mark now and then, as people do who type quickly."""
        if self.chance(CASUAL) and text[1:2].islower():
            text = text[0].lower() + text[1:]
        return text[:-1] if self.chance(CASUAL) and text[-1] in ".!?" else text

    def picks(self, options: Sequence[T], count: int) -> list[T]:
        """Draw different entries."""
        return self.rng.sample(list(self.side(options)), count)

    def person(self) -> tuple[str, str]:
        """Draw a first name with its pronoun."""
        is_girl = self.chance(0.5)
        return self.pick(GIRLS if is_girl else BOYS), "she" if is_girl else "he"

    def people(self, count: int) -> list[tuple[str, str]]:
        """Draw different names with their pronouns."""
        named = [(n, "she") for n in self.side(GIRLS)] + [(n, "he") for n in self.side(BOYS)]
        return self.rng.sample(named, count)

    def any(self, options: Sequence[T]) -> T:
        """Draw from a whole list."""
        return self.rng.choice(options)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def time(self) -> str:
        """Draw a time of day, such as 7:30 pm."""
        hour, minute = self.rng.randint(1, 12), self.rng.choice(("", ":15", ":30", ":45", ":00"))
        return f"{hour}{minute} {self.rng.choice(('am', 'pm'))}"

    def date(self) -> str:
        """Draw a date in one of two spellings."""
        day, month = self.rng.randint(1, 28), self.any(MONTHS)
        return self.any((f"{month} {day}", f"{day} {month}"))

    def price(self) -> str:
        """Draw an amount of money."""
        number = self.any((self.rng.randint(2, 99), self.rng.randint(1, 40) * 5))
        return f"{number} {self.any(('dollars', 'euros', 'pounds'))}"


def is_held_out(wording: str) -> bool:
    return zlib.crc32(wording.encode()) % HELD_OUT_EVERY == 0


def article(noun: str) -> str:
    """Put a or an before a noun."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def listed(words: Sequence[str]) -> str:
    """Join words by commas, the last by and."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
