"""A form with twelve fields, filled in from a note: JSON that fits its schema, whatever the model.

    python -m examples.form [MODEL]

What the form itself prescribes, braces, keys and commas, is pinned and costs no thought; only the
values are the model's. The same form is filled by diffusion and one token at a time.
"""

import json
import sys
from typing import Any

from dgemma import Engine, Options

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
    guide = engine.guide(schema=FORM)
    for mode in ("diffusion", "ar"):
        options = Options(mode=mode, guide=guide, max_tokens=500, seed=1)
        done = engine.generate(f"Fill in the booking form as JSON: {NOTE}", options)
        assert done.finish == "stop", done.fault
        filled = json.loads(done.text)
        assert list(filled) == list(FIELDS)
        print(f"{done.mode}: {done.tokens} tokens, {done.steps} steps, {done.seconds:.1f} s")
        for name, value in filled.items():
            print(f"  {name:<12}{json.dumps(value, ensure_ascii=False)}")


if __name__ == "__main__":
    main()
