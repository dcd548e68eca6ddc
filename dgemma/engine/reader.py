"""Committed ids to promised text, thought and calls, up to a stop string."""

from collections.abc import Sequence

from dgemma.engine.events import Text
from dgemma.text.reply import AnswerText, Reply, ReplyEvent, ReplyParser, ThoughtText
from dgemma.text.stream import StopStrings
from dgemma.text.tokenizer import Tokenizer


class Reader:
    """Reads one reply. Stop strings cut the answer alone; a thought may speak of them."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], *, in_thought: bool) -> None:
        self.parser = ReplyParser(tokenizer, in_thought=in_thought)
        self.stops = StopStrings(stop)
        self.events: list[ReplyEvent] = []
        self.ids: list[int] = []

    @property
    def has_stopped(self) -> bool:
        return self.stops.stopped_by is not None

    @property
    def reply(self) -> Reply:
        return Reply.collect(self.events)

    def feed(self, ids: Sequence[int]) -> list[Text]:
        """Take ids until a stop string is complete; what follows it is no part of the reply."""
        texts: list[Text] = []
        for token in ids:
            if self.has_stopped or self.parser.has_ended:
                break
            texts += self._promise(self.parser.feed([token]))
            if not self.parser.has_ended:
                self.ids.append(token)
        return _joined(texts)

    def close(self) -> list[Text]:
        """What was held back for a character or stop string that never came."""
        texts = self._promise(self.parser.finish())
        held = self.stops.finish()
        self.events.append(AnswerText(text=held))
        return _joined([*texts, Text(text=held)])

    def _promise(self, events: list[ReplyEvent]) -> list[Text]:
        texts = []
        for event in events:
            if isinstance(event, AnswerText):
                event = AnswerText(text=self.stops.feed(event.text))
            self.events.append(event)
            if isinstance(event, AnswerText | ThoughtText):
                is_thought = isinstance(event, ThoughtText)
                texts.append(Text(text=event.text, is_thought=is_thought))
        return texts


def _joined(texts: list[Text]) -> list[Text]:
    """Neighbours of the same kind as one, empty ones left out."""
    joined: list[Text] = []
    for text in texts:
        if joined and joined[-1].is_thought == text.is_thought:
            last = joined.pop()
            text = Text(text=last.text + text.text, is_thought=text.is_thought)
        joined.append(text)
    return [text for text in joined if text.text]
