"""Fill a form of twelve fields from a note: the reply is JSON that fits the schema.

    python -m examples.form [MODEL]

Braces, keys and commas follow from the schema and are pinned; only the values are sampled. The same
form is filled by diffusion and by AR.
"""

import json
import sys
from typing import Any

from dgemma import Engine, SamplingParams

NOTE = "Anna Brown, 34, of Rome, wants a room for two people for 3 nights from 2026-05-01. No dog."
TEXT = {"type": "string", "maxLength": 24}
FIELDS: dict[str, dict[str, Any]] = {
    "first_name": TEXT,
    "last_name": TEXT,
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "city": TEXT,
    "email": {"type": ["string", "null"], "format": "email", "maxLength": 30},
    "arrival": {"type": "string", "format": "date"},
    "nights": {"type": "integer", "minimum": 1, "maximum": 30},
    "guests": {"type": "integer", "minimum": 1, "maximum": 8},
    "room": {"enum": ["single", "double", "suite"]},
    "breakfast": {"type": "boolean"},
    "extras": {"type": "array", "items": {"enum": ["parking", "cot", "dog"]}, "maxItems": 3},
    "remarks": {"type": ["string", "null"], "maxLength": 40},
}
FORM = {
    "type": "object",
    "properties": FIELDS,
    "required": list(FIELDS),
    "additionalProperties": False,
}


def main() -> None:
    engine = Engine.load(sys.argv[1] if len(sys.argv) > 1 else "nano")
    constraint = engine.constraint(schema=FORM)
    for mode in ("diffusion", "ar"):
        params = SamplingParams(mode=mode, constraint=constraint, max_tokens=500, seed=1)
        done = engine.generate(f"Fill in the booking form as JSON: {NOTE}", params)
        assert done.finish == "stop", done.fault
        filled = json.loads(done.text)
        assert list(filled) == list(FIELDS)
        print(f"{done.mode}: {done.tokens} tokens, {done.steps} steps, {done.seconds:.1f} s")
        for name, value in filled.items():
            print(f"  {name:<12}{json.dumps(value, ensure_ascii=False)}")


if __name__ == "__main__":
    main()
