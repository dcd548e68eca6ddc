"""The fields of the requests that fill, edit and solve; docs/serve.md prints these tables too."""

from dgemma.server.fields import COMMON, EFFORT, Field


def _with(*names: str) -> dict[str, Field]:
    return {name: COMMON[name] for name in names}


LONGEST_HOLE = "longest hole; lowered to what one canvas holds"
HARMLESS = {name: field for name, field in COMMON.items() if field.kind == "harmless"}
REFUSED = {name: field for name, field in COMMON.items() if field.kind == "refused"}
SHARED = _with("model", "stream", "stream_options", "temperature", "seed", "stop", "dgemma")
EDITORS_EFFORT = Field("honoured", f"{EFFORT}; fast unless told")
ALONE = Field("refused", "there is one answer", (1,))

FIM: dict[str, Field] = {
    **COMMON,
    "max_tokens": Field("honoured", LONGEST_HOLE),
    "prompt": Field("honoured", "the text before the hole; may be empty if there is a suffix"),
    "suffix": Field("honoured", "the text behind it; without one the prompt is gone on with"),
    "effort": EDITORS_EFFORT,
    "random_seed": Field("honoured", "as seed, Mistral's name for it"),
    "diffusing": Field("refused", "a hole is shown when it is filled; see drafts", (False,)),
}

INFILL: dict[str, Field] = {
    **SHARED,
    "input_prefix": Field("honoured", "the text before the cursor's line"),
    "prompt": Field("honoured", "the cursor's line up to the cursor"),
    "input_suffix": Field("honoured", "the text behind the cursor"),
    "input_extra": Field("honoured", "other texts, {filename, text}; set before the prefix"),
    "n_predict": Field("honoured", f"{LONGEST_HOLE}; 0 answers at once with nothing, -1: no limit"),
    "effort": EDITORS_EFFORT,
    "seed": Field("honoured", "same seed, same answer; -1 draws one"),
    **HARMLESS,
    "samplers": Field("harmless", "as top_p"),
    "id_slot": Field("harmless", "prefixes are found by their tokens"),
    "n_indent": Field("harmless", "lines are not cut by their indentation"),
    "t_max_prompt_ms": Field("harmless", "see dgemma.max_seconds"),
    "t_max_predict_ms": Field("harmless", "see dgemma.max_seconds"),
    "response_fields": Field("harmless", "the answer has all its fields"),
    "n_keep": Field("harmless", "what does not fit is left out at the far ends"),
    "repeat_last_n": Field("harmless", "as presence_penalty"),
    "timings_per_token": Field("harmless", "timings come with the answer"),
    **REFUSED,
    "n_probs": Field("refused", "holes come without probabilities", (0,)),
    "grammar": Field("refused", "holes are not held to a grammar", ("",)),
    "json_schema": Field("refused", "holes are not held to a schema", ({},)),
    "lora": Field("refused", "adapters are chosen when the server starts", ([],)),
}

ONE_MESSAGE: dict[str, Field] = {
    **_with("model", "stream", "stream_options", "temperature", "seed", "dgemma"),
    "max_tokens": Field("honoured", "longest new file; an edit ends where its region ends"),
    "messages": Field("honoured", "one user message in Mercury's form"),
    **HARMLESS,
    "stop": Field("harmless", "an edit ends where its region ends"),
    "max_completion_tokens": Field("harmless", "as max_tokens"),
    "prediction": Field("harmless", "the old text is known"),
    "reasoning_effort": Field("harmless", "an edit has no thought"),
    "parallel_tool_calls": Field("harmless", "there are no tools here"),
    **REFUSED,
    "n": ALONE,
    "diffusing": Field("refused", "an edit is shown when it is done; see drafts", (False,)),
    "tools": Field("refused", "an edit calls no tools", ([],)),
    "tool_choice": Field("refused", "an edit calls no tools", ("auto", "none")),
    "response_format": Field("refused", "an edit is plain text", ({"type": "text"},)),
}

FILL: dict[str, Field] = {
    **SHARED,
    "text": Field(
        "honoured", "a text with the mark of `dgemma fill` at each hole, or the pieces around"
    ),
    "max_tokens": Field("honoured", "longest of each hole; lowered to what one canvas holds"),
    "single_line": Field("honoured", "a hole ends with its line"),
    "allow_empty": Field("honoured", "a hole may stay empty"),
    "candidates": Field("honoured", "1 to 8 ways to fill, the best first"),
    "effort": Field("honoured", f"{EFFORT}; thorough unless told"),
}

EDIT: dict[str, Field] = {
    **_with("model", "stream", "stream_options", "temperature", "seed", "dgemma"),
    "text": Field("honoured", "the text to change"),
    "instruction": Field("honoured", "what to change; without it the text is corrected"),
    "selection": Field("honoured", "spans of characters that may change, [[start, end], ...]"),
    "lines": Field("honoured", "the same as first and last line, counted from 1"),
    "strength": Field("honoured", "0 to 1, how readily text is opened; 0.5, or 1 of a selection"),
    "passes": Field("honoured", "most times over the text"),
}

SUDOKU: dict[str, Field] = {
    **_with("model", "stream", "stream_options", "seed", "dgemma"),
    "puzzle": Field("honoured", "81 cells row by row, 0 or . where one is empty"),
    "pinned": Field("honoured", "whether givens are held in place; true, but false in AR"),
    "restarts": Field("honoured", "most new attempts at a canvas that does not settle, 0 to 16"),
}
