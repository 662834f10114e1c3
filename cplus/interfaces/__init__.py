"""How a task's rows are written, answered and scored: `letter`, `cloze`, `freeform`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast, get_args

from cplus.data.examples import Choice, Example
from cplus.interfaces.cloze import Cloze
from cplus.interfaces.contract import Interface, Rejected
from cplus.interfaces.forms import Chat, Plain
from cplus.interfaces.freeform import Freeform, Turns
from cplus.interfaces.letter import WORDINGS, Letter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["NAMES", "THINKING", "TURNS", "WORDINGS", "Interface", "Rejected", "build", "tokens_by_role"]

NAMES = ("letter", "cloze", "freeform")
TURNS: tuple[str, ...] = get_args(Turns)
THINKING = ("off", "keep")


def build(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    wording: str = "standard",
    chat: bool = True,
    turns: str = "all",
    thinking: str = "off",
) -> Interface:
    """The interface of that name, bound to a tokenizer.

    `wording` is the letter's. `turns` and `thinking` are the free form's: which assistant turns are targets, and
    whether a model that thinks does so (`keep`) or is told not to (`off`). Cloze is always plain text.
    """
    if wording not in WORDINGS:
        raise ValueError(f"expected a wording of {', '.join(WORDINGS)}, got {wording!r}")
    if turns not in TURNS:
        raise ValueError(f"expected turns to be {' or '.join(TURNS)}, got {turns!r}")
    if thinking not in THINKING:
        raise ValueError(f"expected thinking to be {' or '.join(THINKING)}, got {thinking!r}")
    if name == "cloze":
        return Cloze(tokenizer=tokenizer, form=Plain(tokenizer))
    if name not in NAMES:
        raise ValueError(f"expected an interface of {', '.join(NAMES)}, got {name!r}")
    form = Chat(tokenizer, thinking=thinking == "keep" and name == "freeform") if chat else Plain(tokenizer)
    if name == "letter":
        return Letter(tokenizer=tokenizer, form=form, wording=wording)
    return Freeform(tokenizer=tokenizer, form=form, turns=cast(Turns, turns))


def tokens_by_role(interface: Interface, examples: Iterable[Example]) -> dict[str, int]:
    """The tokens of the rows by whose words they are: system, user, assistant, tool, template or text.

    Turns that are learned count with the end of the turn, the others by their words alone; `template` is the rest:
    names of roles, tools, marks. A multiple-choice prompt counts as the user's.
    """
    counts: Counter[str] = Counter()
    for example in examples:
        row = interface.encode(example)
        if isinstance(example, Choice):
            own = Counter(user=len(row.prompt), assistant=len(row.target))
        elif example.is_text:
            own = Counter(text=len(row))
        else:
            own = Counter(assistant=row.num_scored)
            learned = isinstance(interface, Freeform) and interface.turns == "all"
            for turn in example.messages:
                if turn.role != "assistant" or not (learned and turn.trained):
                    own[turn.role] += len(interface.tokenizer.encode(turn.content, add_special_tokens=False))
            own["template"] = max(0, len(row) - own.total())
        counts += own
    return dict(counts)
