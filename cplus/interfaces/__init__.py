"""How a task asks, answers and is scored: `letter`, `cloze`, `freeform`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cplus.interfaces.cloze import Cloze
from cplus.interfaces.contract import Interface, Rejected
from cplus.interfaces.forms import Chat, Plain
from cplus.interfaces.freeform import Freeform
from cplus.interfaces.letter import WORDINGS, Letter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["NAMES", "WORDINGS", "Interface", "Rejected", "build"]

NAMES = ("letter", "cloze", "freeform")


def build(name: str, tokenizer: PreTrainedTokenizerBase, *, wording: str = "standard", chat: bool = True) -> Interface:
    """The interface of that name, bound to a tokenizer; `wording` is the letter's, cloze is plain text in any case."""
    if wording not in WORDINGS:
        raise ValueError(f"expected a wording of {', '.join(WORDINGS)}, got {wording!r}")
    if name == "cloze":
        return Cloze(tokenizer=tokenizer, form=Plain(tokenizer))
    if name not in NAMES:
        raise ValueError(f"expected an interface of {', '.join(NAMES)}, got {name!r}")
    form = Chat(tokenizer) if chat else Plain(tokenizer)
    if name == "letter":
        return Letter(tokenizer=tokenizer, form=form, wording=wording)
    return Freeform(tokenizer=tokenizer, form=form)
