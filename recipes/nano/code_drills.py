"""Small functions with tests, and functions with a planted bug.

Functions are made from a list of operations with the words for them; results of their tests are
computed. A bug is one changed token of a function that somebody wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dgemma.eval.spans import parses, string_lines
from recipes.nano.raw import Function, Pair
from recipes.nano.slots import Draw

FUNCTION = "[this function|this code|the function|the code|this]"
FIX = [
    f"[Fix|Find and fix|Repair|Correct] the [bug|mistake|error][.|! | in {FUNCTION}.|]",
    f"There is a [bug|mistake] in {FUNCTION}. [Fix|Correct] it[.|!|]",
    f"[Fix|Correct|Repair|Debug] {FUNCTION}[.|, please.|:|]",
    "[Something is wrong here|This code is wrong|This does not work]. [Fix|Correct] it[.|]",
]
WRITE = [
    "[Write|Create|Implement] a [Python |]function `{name}` that {what}[.|, please.|]",
    "[Define|Implement|Write] `{name}`, a function that {what}[.|]",
    "I [need|want] a [Python |]function that {what}. Call it `{name}`[.|]",
    "Python: `{name}` should be a function that {what}[.|]",
    "[Give me|Show me] a [Python |]function `{name}` that {what}[.|]",
]
PASS = [
    "[Write|Implement] [a|the] function that passes these [tests|asserts][.|:|]",
    "[Write|Give me] the function for these [tests|asserts][.|:|]",
    "Make these [tests|asserts] pass[.|:|]",
    "[Which function passes these asserts|What function do these tests need]?",
]
TEST = [
    f"Write [two|some] [tests|asserts] for {FUNCTION}[.|]",
    f"Test {FUNCTION} with two asserts[.|]",
    f"[Give me|Add] two asserts that test {FUNCTION}[.|]",
    f"[Add tests|Tests] for {FUNCTION}[.|, please.|:]",
]
DOCUMENT = [
    f"[Add|Write] a [one-line |short |]docstring[.| for {FUNCTION}.| to {FUNCTION}.|]",
    f"Document {FUNCTION}[.|, please.|]",
    f"[Give {FUNCTION} a docstring|Docstring, please]",
]
EXPLAIN = [
    f"What does {FUNCTION} do?",
    f"[Explain|Describe] {FUNCTION}[ in one sentence|][.|]",
    f"[Say|Tell me] what {FUNCTION} does[.|, please.|]",
]


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of a function on its argument: an expression and the words for it."""

    name: str
    takes: str  # numbers, words, text, number
    what: str  # third person
    body: str  # with {x} for the argument and {k} for a number


OPERATIONS: Sequence[Operation] = (
    Operation("add_{k}", "number", "adds {k} to a number", "return {x} + {k}"),
    Operation("subtract_{k}", "number", "subtracts {k} from a number", "return {x} - {k}"),
    Operation("times_{k}", "number", "multiplies a number by {k}", "return {x} * {k}"),
    Operation("divides_by_two", "number", "checks if a number is even", "return {x} % 2 == 0"),
    Operation("leaves_one", "number", "checks if a number is odd", "return {x} % 2 == 1"),
    Operation(
        "is_multiple_of_{k}",
        "number",
        "checks if a number is a multiple of {k}",
        "return {x} % {k} == 0",
    ),
    Operation("square", "number", "returns the square of a number", "return {x} * {x}"),
    Operation(
        "absolute",
        "number",
        "returns the absolute value of a number",
        "return {x} if {x} >= 0 else -{x}",
    ),
    Operation(
        "is_above_{k}", "number", "checks if a number is greater than {k}", "return {x} > {k}"
    ),
    Operation("at_most_{k}", "number", "limits a number to at most {k}", "return min({x}, {k})"),
    Operation(
        "count_down",
        "number",
        "lists the numbers from n down to 1",
        "return list(range({x}, 0, -1))",
    ),
    Operation("sum_to", "number", "sums the numbers from 1 to n", "return sum(range(1, {x} + 1))"),
    Operation(
        "digit_list",
        "number",
        "returns the digits of a number as a list",
        "return [int(d) for d in str({x})]",
    ),
    Operation(
        "add_up_digits",
        "number",
        "returns the sum of a number's digits",
        "return sum(int(d) for d in str({x}))",
    ),
    Operation("first_item", "numbers", "returns the first number of a list", "return {x}[0]"),
    Operation("last_item", "numbers", "returns the last number of a list", "return {x}[-1]"),
    Operation("total", "numbers", "sums a list of numbers", "return sum({x})"),
    Operation(
        "mean", "numbers", "returns the mean of a list of numbers", "return sum({x}) / len({x})"
    ),
    Operation("largest", "numbers", "returns the largest number of a list", "return max({x})"),
    Operation("smallest", "numbers", "returns the smallest number of a list", "return min({x})"),
    Operation(
        "spread",
        "numbers",
        "returns the difference of the largest and smallest number",
        "return max({x}) - min({x})",
    ),
    Operation(
        "evens",
        "numbers",
        "keeps the even numbers of a list",
        "return [n for n in {x} if n % 2 == 0]",
    ),
    Operation(
        "odds",
        "numbers",
        "keeps the odd numbers of a list",
        "return [n for n in {x} if n % 2 == 1]",
    ),
    Operation(
        "above_{k}",
        "numbers",
        "keeps the numbers of a list that are greater than {k}",
        "return [n for n in {x} if n > {k}]",
    ),
    Operation(
        "count_above_{k}",
        "numbers",
        "counts the numbers greater than {k}",
        "return sum(n > {k} for n in {x})",
    ),
    Operation(
        "add_{k}_to_all",
        "numbers",
        "adds {k} to each number of a list",
        "return [n + {k} for n in {x}]",
    ),
    Operation(
        "times_{k}_all",
        "numbers",
        "multiplies each number of a list by {k}",
        "return [n * {k} for n in {x}]",
    ),
    Operation(
        "squares",
        "numbers",
        "returns the squares of a list of numbers",
        "return [n * n for n in {x}]",
    ),
    Operation("reverse_list", "numbers", "reverses a list", "return {x}[::-1]"),
    Operation(
        "sort_down",
        "numbers",
        "sorts a list in descending order",
        "return sorted({x}, reverse=True)",
    ),
    Operation(
        "without_copies",
        "numbers",
        "removes duplicates and keeps the order",
        "return list(dict.fromkeys({x}))",
    ),
    Operation("first_{k}", "numbers", "returns the first {k} items of a list", "return {x}[:{k}]"),
    Operation("drop_{k}", "numbers", "drops the first {k} items of a list", "return {x}[{k}:]"),
    Operation("every_second", "numbers", "returns every second item of a list", "return {x}[::2]"),
    Operation(
        "product",
        "numbers",
        "multiplies all numbers of a list",
        "result = 1\n    for n in {x}:\n        result *= n\n    return result",
    ),
    Operation(
        "running_total",
        "numbers",
        "returns the running totals of a list",
        "total, totals = 0, []\n    for n in {x}:\n        total += n\n"
        "        totals.append(total)\n    return totals",
    ),
    Operation(
        "index_of_max",
        "numbers",
        "returns the index of the largest number",
        "return {x}.index(max({x}))",
    ),
    Operation("goes_up", "numbers", "checks if a list is sorted", "return {x} == sorted({x})"),
    Operation(
        "longest_word", "words", "returns the longest word of a list", "return max({x}, key=len)"
    ),
    Operation(
        "shortest", "words", "returns the shortest word of a list", "return min({x}, key=len)"
    ),
    Operation(
        "lengths", "words", "returns the length of each word", "return [len(word) for word in {x}]"
    ),
    Operation(
        "longer_than_{k}",
        "words",
        "keeps the words longer than {k} letters",
        "return [word for word in {x} if len(word) > {k}]",
    ),
    Operation(
        "initials",
        "words",
        "returns the first letter of each word",
        "return [word[0] for word in {x}]",
    ),
    Operation("join_words", "words", "joins words with spaces", "return ' '.join({x})"),
    Operation("join_dashes", "words", "joins words with dashes", "return '-'.join({x})"),
    Operation(
        "upper_words",
        "words",
        "puts each word in upper case",
        "return [word.upper() for word in {x}]",
    ),
    Operation(
        "sort_by_length", "words", "sorts words by their length", "return sorted({x}, key=len)"
    ),
    Operation(
        "count_words",
        "words",
        "counts how often each word occurs",
        "counts = {{}}\n    for word in {x}:\n"
        "        counts[word] = counts.get(word, 0) + 1\n    return counts",
    ),
    Operation("reverse_text", "text", "reverses a string", "return {x}[::-1]"),
    Operation(
        "reads_both_ways", "text", "checks if a string is a palindrome", "return {x} == {x}[::-1]"
    ),
    Operation(
        "how_many_vowels",
        "text",
        "counts the vowels of a string",
        "return sum(c in 'aeiou' for c in {x})",
    ),
    Operation(
        "without_vowels",
        "text",
        "removes the vowels of a string",
        "return ''.join(c for c in {x} if c not in 'aeiou')",
    ),
    Operation(
        "shout",
        "text",
        "returns a string in upper case with an exclamation mark",
        "return {x}.upper() + '!'",
    ),
    Operation("repeat_{k}", "text", "repeats a string {k} times", "return {x} * {k}"),
    Operation(
        "first_letters_{k}", "text", "returns the first {k} letters of a string", "return {x}[:{k}]"
    ),
    Operation("capitalize_text", "text", "capitalizes a string", "return {x}.capitalize()"),
    Operation("count_letter_a", "text", "counts the letter a in a string", "return {x}.count('a')"),
    Operation(
        "letters", "text", "returns the sorted letters of a string", "return sorted(set({x}))"
    ),
    Operation("ends_with_s", "text", "checks if a string ends with s", "return {x}.endswith('s')"),
    Operation("text_length", "text", "returns the length of a string", "return len({x})"),
)
ARGUMENTS = {
    "number": ["n", "x", "number", "value", "num"],
    "numbers": ["numbers", "values", "nums", "items", "data"],
    "words": ["words", "names", "strings", "items", "texts"],
    "text": ["text", "s", "string", "word", "line"],
}
WORDS = "apple pear dog cat sun moon tree house level noon radar sea bird stone anna milk".split()


@dataclass(frozen=True, slots=True)
class SmallFunction:
    name: str
    what: str
    code: str
    tests: Sequence[str]


def small_function(draw: Draw) -> SmallFunction:
    """Draw a function of one operation, with two tests whose results are computed."""
    operation = draw.pick(OPERATIONS)
    k, argument = draw.rng.randint(2, 9), draw.pick(ARGUMENTS[operation.takes])
    name = operation.name.format(k=k)
    code = f"def {name}({argument}):\n    {operation.body.format(x=argument, k=k)}"
    scope: dict[str, Callable[[object], object]] = {}
    exec(code, scope)  # our own operations
    tests = []
    for _ in range(2):
        value = example(draw, operation.takes)
        tests.append(f"assert {name}({value!r}) == {scope[name](value)!r}")
    return SmallFunction(name, operation.what.format(k=k), code, tests)


def example(draw: Draw, takes: str) -> object:
    rng = draw.rng
    if takes == "number":
        return rng.randint(1, 30)
    if takes == "text":
        return rng.choice(WORDS)
    count = rng.randint(2, 5)
    return rng.sample(range(20), count) if takes == "numbers" else rng.sample(WORDS, count)


def drill_pairs(draw: Draw, count: int) -> Iterator[Pair]:
    """Ask for a small function, its tests, its docstring, or what it does."""
    for _ in range(count):
        made = small_function(draw)
        head, body = made.code.split("\n", 1)
        doc = f'{head}\n    """{made.what.capitalize().replace(" N ", " n ")}."""\n{body}'
        tests = "\n".join(made.tests)
        kinds = [
            (draw.phrase(WRITE).format(name=made.name, what=made.what), made.code),
            (draw.phrase(WRITE).format(name=made.name, what=made.what), made.code),
            (f"{draw.phrase(PASS)}\n\n{tests}", made.code),
            (f"{draw.phrase(TEST)}\n\n{made.code}", tests),
            (f"{draw.phrase(DOCUMENT)}\n\n{made.code}", doc),
            (f"{draw.phrase(EXPLAIN)}\n\n{made.code}", f"It {made.what}."),
        ]
        prompt, reply = draw.any(kinds)
        yield {"prompt": prompt, "reply": reply}


# --- bugs

SLIPS: Sequence[tuple[str, str]] = [
    *((r" < ", " > "), (r" > ", " < "), (r" <= ", " >= "), (r" >= ", " <= "), (r" == ", " != ")),
    *((r" != ", " == "), (r" \+ ", " - "), (r" - ", " + "), (r" \+= ", " -= "), (r" -= ", " += ")),
    *((r" and ", " or "), (r" or ", " and "), (r" not in ", " in "), (r" is None", " is not None")),
    *((r" is not None", " is None"), (r"\bTrue\b", "False"), (r"\bFalse\b", "True")),
    *((r"\[0\]", "[1]"), (r"\[-1\]", "[0]"), (r"\.append\(", ".extend("), (r" // ", " / ")),
    *((r"\bif not ", "if "), (r"\breturn ", ""), (r" \+ 1\b", ""), (r" - 1\b", "")),
    *(
        (r"\bmin\(", "max("),
        (r"\bmax\(", "min("),
        (r":$", ""),
        (r"\)$", ""),
        (r"\breturn\b", "retrun"),
    ),
]


def bug_pairs(draw: Draw, functions: Sequence[Function], count: int) -> Iterator[Pair]:
    """Plant one bug in each function and ask for the original."""
    made = 0
    for function in draw.rng.sample(list(functions), len(functions)):
        wrong = plant_bug(draw, function.code)
        if wrong is not None and made < count:
            made += 1
            prompt = f"{draw.phrase(FIX)}\n\n{wrong.rstrip()}"
            yield {"prompt": prompt, "reply": function.code.rstrip("\n")}


def plant_bug(draw: Draw, code: str) -> str | None:
    """Change one token of the body outside strings of several lines and comments."""
    in_string, found = string_lines(code), []
    for number, line in enumerate(code.splitlines(), 1):
        if number == 1 or number in in_string or line.lstrip().startswith(("#", "def", "@", '"""')):
            continue
        for pattern, new in SLIPS:
            match = re.search(pattern, line)
            if match:
                found.append((number, line[: match.start()] + new + line[match.end() :]))
    if not found:
        return None
    number, line = draw.any(found)
    lines = code.splitlines()
    lines[number - 1] = line
    changed = "\n".join(lines) + "\n"
    # Half of what Python cannot parse is dropped: a bug is more often one of meaning.
    return changed if parses(changed) or draw.chance(0.5) else None
