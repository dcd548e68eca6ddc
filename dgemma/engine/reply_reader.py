"""Reads committed ids as text, thought and tool calls, up to a stop string."""

from collections.abc import Sequence
from itertools import groupby

from dgemma.engine.events import Text
from dgemma.text.detokenizer import StopStrings
from dgemma.text.reply import (
    ENDINGS,
    AnswerText,
    Reply,
    ReplyEvent,
    ReplyParser,
    ThoughtText,
)
from dgemma.text.tokenizer import Tokenizer


class ReplyReader:
    """Reads one reply. Stop strings cut the answer alone; a thought may speak of them."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], *, in_thought: bool) -> None:
        self.parser = ReplyParser(tokenizer, in_thought=in_thought)
        self.tokenizer, self.stops = tokenizer, StopStrings(stop)
        self.can_stop, names = bool(stop), tokenizer.control_ids
        self.control = frozenset(names.values())
        self.endings = frozenset(names[name] for name in ENDINGS if name in names)
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
        if self.has_stopped or self.parser.has_ended:
            return []
        if self.can_stop and self._may_stop_in(ids):
            return self._feed_singly(ids)
        texts = self._commit(self.parser.feed(ids))
        end = next((i for i, token in enumerate(ids) if token in self.endings), len(ids))
        self.ids += ids[:end]
        return _merged(texts)

    def _may_stop_in(self, ids: Sequence[int]) -> bool:
        """True if a stop string may be complete after these ids; a control token splits text."""
        is_plain = self.control.isdisjoint(ids)
        return not is_plain or self.stops.may_stop_in(self.tokenizer.decode_bytes(ids))

    def _feed_singly(self, ids: Sequence[int]) -> list[Text]:
        """Take one token at a time, to see which of them completes a stop string."""
        texts: list[Text] = []
        for token in ids:
            if self.has_stopped or self.parser.has_ended:
                break
            texts += self._commit(self.parser.feed([token]))
            if not self.parser.has_ended:
                self.ids.append(token)
        return _merged(texts)

    def close(self) -> list[Text]:
        """Return text that was withheld for a character or stop string that was not completed."""
        texts = self._commit(self.parser.finish())
        rest = self.stops.finish()
        self.events.append(AnswerText(text=rest))
        return _merged([*texts, Text(text=rest)])

    def _commit(self, events: list[ReplyEvent]) -> list[Text]:
        texts = []
        for event in events:
            if isinstance(event, AnswerText):
                event = AnswerText(text=self.stops.feed(event.text))
            self.events.append(event)
            if isinstance(event, AnswerText | ThoughtText):
                is_thought = isinstance(event, ThoughtText)
                texts.append(Text(text=event.text, is_thought=is_thought))
        return texts


def _merged(texts: list[Text]) -> list[Text]:
    """Merge neighbours of the same kind; drop empty ones."""
    groups = groupby((text for text in texts if text.text), key=lambda text: text.is_thought)
    return [
        Text(text="".join(text.text for text in group), is_thought=is_thought)
        for is_thought, group in groups
    ]
