"""BLiMP: of two sentences, the grammatical one should be likelier under the causal pass."""

from collections import defaultdict

from dgemma.engine import Engine
from dgemma.eval.answers import show
from dgemma.eval.data import Data, read_zip
from dgemma.eval.likelihood import causal_losses
from dgemma.eval.measure import Case, Measure

TASK = "blimp"
LIMIT = 1000  # pairs of each of the 67 paradigms, which is all of them


def blimp(engine: Engine, data: Data, limit: int | None, seed: int) -> list[Measure]:
    """Accuracy over all paradigms, and by field. Nothing here is random."""
    fields: dict[str, list[bool]] = defaultdict(list)
    paradigms = list(read_zip(data.evaluation("BLiMP.zip"), limit or LIMIT))
    begin = engine.model.config.bos_token_id
    for number, records in enumerate(paradigms, start=1):
        sentences = [r[key] for key in ("sentence_good", "sentence_bad") for r in records]
        texts = [(begin, *engine.tokenizer.encode(sentence)) for sentence in sentences]
        losses = [sum(loss) for loss in causal_losses(engine.model, texts)]
        for index, record in enumerate(records):
            field = record["field"].replace("_", "/")  # the files spell one of them both ways
            fields[field].append(losses[index] < losses[len(records) + index])
        show(TASK, number, len(paradigms))
    case = Case(TASK, "ar")
    every = [hit for hits in fields.values() for hit in hits]
    measures = [case.share("all", every, f"{len(paradigms)} paradigms, causal likelihood")]
    return measures + [case.share(name, hits) for name, hits in sorted(fields.items())]
