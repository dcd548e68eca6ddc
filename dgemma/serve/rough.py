"""The text of an unfinished canvas: what an answer would be if it were committed now.

For clients that replace the text with each chunk. Nothing of it is promised.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dgemma.engine import Draft, Text
    from dgemma.engine.options import Plan
    from dgemma.text.tokenizer import StopIds, Tokenizer


class Rough:
    """One answer as it stands, from the drafts and texts it reports."""

    def __init__(self, plan: "Plan", tokenizer: "Tokenizer", stops: "StopIds") -> None:
        self.plan, self.tokenizer, self.stops = plan, tokenizer, stops
        self.answer = self.thought = ""  # promised
        self._before = ("", "")  # promised before the first canvas, by the AR part of hybrid mode
        self._blocks: list[int] = []  # tokens of finished canvases
        self._draft: Draft | None = None

    def promise(self, text: "Text") -> None:
        if text.is_thought:
            self.thought += text.text
        else:
            self.answer += text.text

    def draw(self, draft: "Draft") -> tuple[str, str]:
        """Answer and thought with this canvas as it stands."""
        from dgemma.text.reply import parse_reply
        from dgemma.text.stream import StopStrings

        if self._draft is None:
            self._before = (self.answer, self.thought)
        elif draft.block > self._draft.block:
            self._blocks += self._draft.guess
        self._draft = draft
        ids, _ = self.stops.cut([*self._blocks, *draft.guess])
        in_thought = self.plan.prompt.in_thought and self.plan.mode == "diffusion"
        reply = parse_reply(self.tokenizer, ids[: self.plan.max_tokens], in_thought=in_thought)
        stops = StopStrings(self.plan.options.stop)
        answer = stops.feed(reply.answer) + stops.finish()
        return self._before[0] + answer, self._before[1] + reply.thought
